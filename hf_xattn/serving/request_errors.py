"""What clients of `hf-xattn serve` hear of errors: their own in words, those of the server in a sentence.

The words of an error of the server may name its files, so they go to its log alone.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError
from transformers.utils import logging


logger = logging.get_logger(__name__)

# A path of this machine in the words of an error, but not the path of an address.
PATH = re.compile(r"(?<![\w.:/])~?/[\w.-]+/[\w.-]|(?<!\w)[A-Za-z]:\\\w")
FAILURE = "The server has failed at this request. Its log has the reason."


class Refused(ValueError):
    """What is wrong with a request, in words for its client."""


def told(error: Exception) -> tuple[int, str]:
    """The status and the words with which a client hears of an error. Errors of the server go to its log."""
    if isinstance(error, Refused):
        return 400, str(error)
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, (ValueError, TypeError, TemplateError)) and not PATH.search(words):
        return 400, words  # they name the wrong argument
    logger.error("A request has failed", exc_info=error)
    return 500, FAILURE


def error_json(status: int, message: str) -> dict[str, Any]:
    """An error in the form of the OpenAI API, so that clients find the message."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
