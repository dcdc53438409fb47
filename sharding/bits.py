"""Sorted positions and small numbers as bits: Rice codes (Rice and Plaunt, 1971), all elements of a stream at once.

A set of positions among n is stored by its gaps, or by those of what it lacks where that is smaller; numbers that are mostly 1
by the set of those that are not. Streams begin at whole bytes; lengths are varints.
"""

import numpy as np

LONGEST = 16
"""quotients of a Rice code from here on leave the unary stream for one of whole bytes, so that an outlier costs little"""


class Writer:
    """Bytes that `Reader` reads in the same order."""

    def __init__(self) -> None:
        self.data = bytearray()

    def number(self, value: int) -> None:
        """Of at least 0, in 7 bits a byte."""
        while value >= 128:
            self.data.append(value & 127 | 128)
            value >>= 7
        self.data.append(value)

    def flags(self, values: np.ndarray) -> None:
        """bool `[n]`; the reader knows n."""
        self.data += np.packbits(values).tobytes()

    def numbers(self, values: np.ndarray) -> None:
        """uint64 `[n]`, small ones often; the reader knows n."""
        if not len(values):
            return
        bits = _best(values)
        high = values >> np.uint64(bits)
        unary = np.minimum(high, LONGEST).astype(np.int64)
        ends = np.cumsum(unary + 1)
        marks = np.zeros(ends[-1], bool)
        marks[ends - 1] = True
        escaped = high[unary == LONGEST]
        width = (int(escaped.max()).bit_length() + 7) // 8 if len(escaped) else 0
        self.data += bytes((bits, width))
        self.number(int(ends[-1]))
        self.flags(marks)
        low = values.astype(np.uint32)
        for bit in range(bits):
            self.flags((low >> np.uint32(bit)).astype(np.uint8) & 1)
        self.data += escaped.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()

    def positions(self, values: np.ndarray, size: int) -> None:
        """int64 `[n]`, rising, below `size`, which the reader knows."""
        inverted = 2 * len(values) > size
        if inverted:
            values = _others(values, size)
        self.number(2 * len(values) + inverted)
        self.numbers(np.diff(values, prepend=-1).astype(np.uint64) - np.uint64(1))

    def steps(self, values: np.ndarray) -> None:
        """int64 `[n]`, none of them 0, mostly 1 or -1; the reader knows n."""
        self.flags(values < 0)
        sizes = np.abs(values)
        large = np.flatnonzero(sizes > 1)
        self.positions(large, len(values))
        self.numbers((sizes[large] - 2).astype(np.uint64))


class Reader:
    """What a `Writer` wrote. Asserts: what comes here has passed a checksum."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.at = 0

    def bytes(self, count: int) -> np.ndarray:
        assert self.at + count <= len(self.data), "the data ends early"
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = int(self.bytes(1)[0])
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def flags(self, count: int) -> np.ndarray:
        return np.unpackbits(self.bytes((count + 7) // 8), count=count).view(bool)

    def numbers(self, count: int) -> np.ndarray:
        if not count:
            return np.zeros(0, np.uint64)
        bits, width = (int(byte) for byte in self.bytes(2))
        marks = self.flags(self.number())
        high = np.diff(np.flatnonzero(marks), prepend=-1).astype(np.uint64) - np.uint64(1)
        assert len(high) == count, "a stream of numbers is not as long as its header says"
        low = np.zeros(count, np.uint32)
        for bit in range(bits):
            low |= self.flags(count).astype(np.uint32) << np.uint32(bit)
        if width:
            escaped = np.flatnonzero(high == LONGEST)
            whole = np.zeros((len(escaped), 8), np.uint8)
            whole[:, :width] = self.bytes(width * len(escaped)).reshape(-1, width)
            high[escaped] = whole.view("<u8")[:, 0]
        return (high << np.uint64(bits)) | low

    def positions(self, size: int) -> np.ndarray:
        count, inverted = divmod(self.number(), 2)
        values = np.cumsum(self.numbers(count).astype(np.int64) + 1) - 1
        return _others(values, size) if inverted else values

    def steps(self, count: int) -> np.ndarray:
        negative = self.flags(count)
        sizes = np.ones(count, np.int64)
        large = self.positions(count)
        sizes[large] = self.numbers(len(large)).astype(np.int64) + 2
        return np.where(negative, -sizes, sizes)


def _best(values: np.ndarray) -> int:
    """Low bits that make the code shortest: within one of the mean's logarithm, unless outliers raise the mean."""

    def cost(bits: int) -> int:
        high = values >> np.uint64(bits)
        return len(values) * bits + int(np.minimum(high, LONGEST).sum()) + 48 * int((high >= LONGEST).sum())

    guess = min(int(values.mean(dtype=np.float64)).bit_length(), 31)
    best = min(range(max(0, guess - 2), guess + 1), key=cost)
    while best > 0 and cost(best - 1) < cost(best):
        best -= 1
    return best


def _others(values: np.ndarray, size: int) -> np.ndarray:
    """Positions below `size` that are not among `values`."""
    rest = np.ones(size, bool)
    rest[values] = False
    return np.flatnonzero(rest)
