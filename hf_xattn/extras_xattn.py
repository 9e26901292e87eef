"""What the models can do beside the core: which extra stands in which place of it.

The core is what a reader needs to follow an image through `generate`: configuration, `layers`, `decoders`, `images`,
`cache`, and the files of the top level that end in `_xattn`. It imports nothing of its extras. It names places for
them, as methods that do nothing, and this file puts the extras there:

    find_source                          images that were encoded before, by content   storage/image_store.py
    images_of_nobody, zero_of_others     processes that wait for each other            learning/stand_in.py
    find_numbering                       places of images in their row                 parts/perceiver.py
    find_samples                         several samples in one text row               parts/packed_rows.py
    why_uncached                         layers that a backward pass runs again        learning/activation_wrappers.py
    image_identity                       whose weights have encoded a cache's images   checkpoints/model_identity.py
    _get_logits_processor                added tokens in the prompt of `generate`      parts/vocabulary.py

Other extras register themselves by name in a table of the core, when they are imported: `parts/` (the connectors
`"perceiver"` and `"mlp_2d"`, T5's position bias, towers that read tiles) and `storage/int8_states.py` (`cache_dtype`).

The base class of both models, `checkpoints/pretrained.py`, holds what transformers expects there: loading, saving,
quantization, sharding.
"""

from __future__ import annotations

from .checkpoints.model_identity import XAttnIdentityMixin
from .learning.activation_wrappers import XAttnRecomputingMixin
from .learning.stand_in import XAttnStandInMixin
from .parts.grid_code import mlp_2d
from .parts.packed_rows import XAttnPackingMixin
from .parts.perceiver import XAttnNumberingMixin, perceiver
from .parts.position_bias import relative_position_bucket
from .parts.tiles import Tiles
from .parts.vocabulary import XAttnVocabularyMixin
from .storage.image_store import XAttnStoreDelegationMixin, XAttnStoreMixin
from .storage.int8_states import Int8States


# The files of these register them, by the names that a configuration, or `cache_dtype`, has for them.
REGISTERED = (Int8States, Tiles, mlp_2d, perceiver, relative_position_bucket)


class XAttnExtrasMixin(
    XAttnStoreMixin,
    XAttnStandInMixin,
    XAttnIdentityMixin,
    XAttnNumberingMixin,
    XAttnPackingMixin,
    XAttnRecomputingMixin,
):
    """The extras of [`XAttnModel`]."""


class XAttnOuterExtrasMixin(XAttnStoreDelegationMixin, XAttnVocabularyMixin):
    """The extras of [`XAttnForConditionalGeneration`]."""
