"""Errors as HTTP clients get them."""

from typing import Any

OUR_NAMES = {"allowed_ids": "allowed_token_ids", "stop_ids": "stop_token_ids", "prompt_ids": "prompt"}
"""the engine's fields that OpenAI's clients call otherwise"""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        kinds = {429: "rate_limit_error", 401: "authentication_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal(error: ValueError) -> ApiError:
    """The engine's refusal of a request, with the field's name as clients know it."""
    name, colon, rest = str(error).partition(":")
    name = OUR_NAMES.get(name, name)
    return ApiError(f"{name}{colon}{rest}", param=name if colon else None)
