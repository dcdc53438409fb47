"""The page pool's books: which pages are free, and how many hold on to each. Page 0 is the trash page."""


class PagePool:
    """Reference counts of pages 1 .. num_pages - 1. A page is free when nobody holds it."""

    def __init__(self, num_pages: int):
        assert num_pages > 1
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.refs[0] = 1  # padding writes go there; it is never handed out
        self.num_shared = 0
        """pages that more than one holds"""
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page, held once. The caller makes room first."""
        page = self._free.pop()
        assert self.refs[page] == 0, page
        self.refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        assert self.refs[page] > 0, f"page {page} is free"
        self.refs[page] += 1
        self.num_shared += self.refs[page] == 2

    def drop(self, page: int) -> None:
        assert page != 0 and self.refs[page] > 0, f"page {page} is not held"
        self.refs[page] -= 1
        self.num_shared -= self.refs[page] == 1
        if self.refs[page] == 0:
            self._free.append(page)
