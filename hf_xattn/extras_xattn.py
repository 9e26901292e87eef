"""Connects the models with their extras, the features outside of the core.

The core is the code that an image passes on its way through `generate`: the configuration, the subpackages `layers`,
`decoders`, `images` and `cache`, `call.py`, and the files of the top level that end in `_xattn`, but for this file and
`processing_xattn.py`. The core imports no extra. It has methods that do nothing, and the classes of this file override
them with extras:

    method of the core                 what the extra does                              file of the extra
    find_source                        finds images that were encoded before            storage/image_store.py
    images_of_nobody, zero_of_others   keep several processes in step                   learning/stand_in.py
    find_samples                       finds the samples of a packed row                parts/packed_rows.py
    recomputes_layers                  finds layers that a backward pass runs again     learning/activation_wrappers.py
    image_identity                     identifies the weights that encode images        checkpoints/model_identity.py
    _get_logits_processor              allows added tokens in the prompt of `generate`  parts/vocabulary.py

Other extras register themselves by name in a table of the core, when they are imported: files of `parts/` (the
connectors `"perceiver"` and `"mlp_2d"`, T5's position bias, towers that read tiles) and `storage/int8_states.py`
(`cache_dtype`).

The base class of both models is in `checkpoints/pretrained.py`. It has the methods that transformers expects of a
model: for loading, saving, quantization and sharding.
"""

from __future__ import annotations

from .checkpoints.model_identity import XAttnIdentityMixin
from .learning.activation_wrappers import XAttnRecomputingMixin
from .learning.stand_in import XAttnStandInMixin
from .parts.grid_code import mlp_2d
from .parts.packed_rows import XAttnPackingMixin
from .parts.perceiver import perceiver
from .parts.position_bias import relative_position_bucket
from .parts.tiles import Tiles
from .parts.vocabulary import XAttnVocabularyMixin
from .storage.image_store import XAttnStoreMixin
from .storage.int8_states import Int8States


# Importing these registers them under names, for fields of the configuration and for `cache_dtype`.
REGISTERED = (Int8States, Tiles, mlp_2d, perceiver, relative_position_bucket)


class XAttnExtrasMixin(
    XAttnStoreMixin,
    XAttnStandInMixin,
    XAttnIdentityMixin,
    XAttnPackingMixin,
    XAttnRecomputingMixin,
):
    """The extras of [`XAttnModel`]."""


class XAttnOuterExtrasMixin(XAttnStoreMixin, XAttnVocabularyMixin):
    """The extras of [`XAttnForConditionalGeneration`]."""
