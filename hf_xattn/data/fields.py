"""The names that a row, its turns and their parts may have: what nobody reads is told, not dropped.

A key of a turn or a part is read, or it is an error. A row may have columns of its own. Of these, names close to one
that is read are errors, and so are the fields by which other trainers steer what is learned or shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..processing.chat_messages import HINTS, IMAGES, SOURCES, VIDEOS, WITHOUT_CONTENT
from ..utils.keywords import suggestion


# The fields that each form of an example needs.
FORMS = (
    ("text",),
    ("caption",),
    ("question", "answer"),
    ("messages",),
    ("prompt", "completion"),
    ("conversations",),
    ("texts",),
)
SYSTEM = "system"
PICTURES = ("file_name", "image", "images")
# Columns of what the model would see elsewhere. They are not supported, so a row with one of them is refused.
NOT_READ = ("tools", "functions", "chat_template_kwargs", "video", "videos")
# Keys of an assistant message that say whether it is trained on, with 0 or 1: OpenAI's, and those of other trainers.
TRAINED = ("weight", "train", "training", "loss", "loss_scale", "loss_weight")
# Keys of a message. Chat templates read the others; of `annotations`, which OpenAI's API returns, nothing is shown.
OF_TURNS = ("role", "content", *TRAINED, *WITHOUT_CONTENT, "name", "tool_call_id", "tool_plan", "annotations")
# Keys of a part. `index` counts the images of the column, as in llava-instruct-mix.
OF_PARTS = ("type", "text", *IMAGES, *VIDEOS, *SOURCES, *HINTS, "index", "annotations")
# Fields of a row by which other trainers weigh it. 1 changes nothing.
WEIGHTS = (*TRAINED, "sample_weight")
# Fields by which they say what is learned of a row.
LEARNED = """
    loss_mask mask masked assistant_masks completion_mask labels_mask roles_to_train train_on_roles train_on_input
    train_on_inputs train_on_prompt train_detail mask_prompt mask_history kto_tag chosen rejected rejected_response
    rejected_messages preferred_output non_preferred_output
""".split()
# Fields by which they add to what the model is shown.
SHOWN = """
    system_prompt system_message system_instruction sys_prompt meta_instruction preamble developer instruction history
    documents available_tools chat_template enable_thinking min_pixels max_pixels resized_height resized_width
""".split()
OPTIONAL = (SYSTEM, *PICTURES, *NOT_READ)


def check_fields(row: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a field of a row, without those that are None, that was meant to be read and is not."""
    weights, others = ({_plain(name) for name in names} for names in (WEIGHTS, (*LEARNED, *SHOWN, "label")))
    of_forms = {name for form in FORMS for name in form}
    for name, value in row.items():
        if not isinstance(name, str) or name in (*OPTIONAL, *of_forms):
            continue
        plain = _plain(name)
        if plain in weights and not (isinstance(value, (int, float)) and value == 1):
            raise ValueError(
                f"Expected the field `{name}` of a row to be 1, got {value!r:.100}: rows have no weights. Give "
                "assistant messages a `weight` of 0 or 1, or remove the field."
            )
        # A boolean `label` is that of KTO; other ones are classes.
        if plain in others and (isinstance(value, bool) if plain == "label" else _says_something(value)):
            raise ValueError(
                f"Expected a row without the field `{name}`, by which other trainers steer what is learned or shown, "
                f"and which is not read here, got {value!r:.100}. Write a system message as `{SYSTEM}` and others into "
                "`messages`, or rename or remove the field."
            )
        absent = [each for each in of_forms if each not in row and each.rstrip("s") != name.rstrip("s")]
        hint = _near(name, [*OPTIONAL, "weight"], 0.8) or _near(name, absent, 0.87)
        if hint and plain not in weights:
            raise ValueError(f"Nothing reads the field `{name}` of a row.{hint} Rename or remove it.")


def check_keys(where: str, given: Iterable[Any], known: Collection[str]) -> None:
    """Raises a `ValueError` for a key of a turn or a part that is not known. `where` names it."""
    for key in given:
        if key not in known:
            raise ValueError(
                f"Nothing reads the key {key!r} of {where}.{suggestion(str(key), known, 0.75)} Expected one of "
                f"{sorted(known)}."
            )


def keys_of_template(template: Any) -> frozenset[str]:
    """The keys that a chat template, or a dict of several, may read of a message: the names that it looks up."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    found = re.compile(
        r"""\.(\w+)\b(?!\s*\()|\[\s*['"](\w+)['"]|\bget\(\s*['"](\w+)['"]|['"](\w+)['"]\s+(?:not\s+)?in\b"""
    )
    return frozenset(name for text in texts if text for names in found.findall(text) for name in names if name)


def _plain(name: str) -> str:
    """A name as it is in every style: `loss_scale`, `lossScale`, `loss-scale`."""
    return re.sub(r"[-_ ]", "", name).lower()


def _says_something(value: Any) -> bool:
    return bool(value) if isinstance(value, (str, int, float, Mapping, list, tuple)) else value is not None


def _near(name: str, known: Iterable[str], cutoff: float) -> str:
    """` Did you mean ...?` for a misspelt name. A longer one, such as `question_id`, is another."""
    lower = name.lower()
    alike = [each for each in known if each[0] == lower[:1]]  # `height` is no `weight`
    stems = {each: each.rstrip("s") for each in alike}
    return suggestion(
        lower, [e for e in alike if not lower.startswith(stems[e]) or len(lower) < len(stems[e]) + 2], cutoff
    )
