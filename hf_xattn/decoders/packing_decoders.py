"""Which decoders keep the samples of a packed row apart.

transformers builds masks from `position_ids` in one place (`masking_utils.py`), for decoders that hand `position_ids`
to it. A decoder that does not lets every sample read those before it; a recurrent layer carries its state from one to
the next. The source code tells, without running the model. The test suite compares packed with padded rows on a small
model of each architecture.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Sequence

from torch import nn
from transformers import PreTrainedModel

from ..utils import memoized


# Kinds of layers in `config.layer_types` that carry a state over the text.
RECURRENT = ("conv", "linear_attention", "hybrid", "hybrid_sliding")


def why_not_packed(text_model: PreTrainedModel, modules: Sequence[nn.Module]) -> str | None:
    """Says why packed rows do not work with a decoder; None if they do.

    `modules`: the causal language model, the models inside it and the decoder: one of these makes the masks.
    """
    config = text_model.config
    who = f"{type(text_model).__name__} (model_type {config.model_type!r})"
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if text_model._is_stateful or kinds & {*RECURRENT}:
        return f"{who}, which has recurrent layers: their state passes from one sample to the next"
    if "position_ids" not in inspect.signature(text_model.forward).parameters:
        return f"{who}, which takes no `position_ids`"
    if not any(_masks_follow_positions(type(module)) for module in modules):
        return f"{who}, whose attention mask does not depend on `position_ids`"
    return None


@memoized
def _masks_follow_positions(decoder_class: type[nn.Module]) -> bool:
    """Whether `forward` hands `position_ids` to what makes its masks: as a keyword, or in a dict of keywords."""
    forward = inspect.unwrap(decoder_class.forward)
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return False
    nodes = list(ast.walk(function))
    chosen = {  # mask_function = create_causal_mask if ... else create_sliding_window_causal_mask
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp)
        if _makes_masks(node.value.body) and _makes_masks(node.value.orelse)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    makers = [node for node in nodes if isinstance(node, ast.Call) and _makes_masks(node.func, chosen)]
    in_dicts = any(
        isinstance(node, ast.Dict)
        and {"attention_mask", "position_ids"} <= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in nodes
    )
    return any(
        keyword.arg == "position_ids" or (keyword.arg is None and in_dicts)
        for call in makers
        for keyword in call.keywords
    )


def _makes_masks(called: ast.expr, others: Collection[str] = ()) -> bool:
    """Whether an expression names a mask function of transformers (`create_causal_mask`), or one of `others`."""
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in others or (name.startswith("create_") and "mask" in name)
