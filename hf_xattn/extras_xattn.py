"""What the models can do beside the core: which extra stands in which place of it.

The core is what a reader needs to follow an image through `generate`: configuration, `layers`, `decoders`, `images`,
`cache`, and the files of the top level that end in `_xattn`. It imports nothing of its extras. It names places for
them, as methods that do nothing, and this file puts the extras there:

    find_source                          images that were encoded before, by content   storage/model_store.py
    images_of_nobody, zero_of_others     processes that wait for each other            learning/stand_in.py
    find_numbering                       places of images in their row                 parts/image_positions.py
    find_samples                         several samples in one text row               packing/packed_rows.py
    why_uncached                         layers that a backward pass runs again        learning/activation_wrappers.py
    image_identity                       whose weights have encoded a cache's images   checkpoints/model_identity.py

The base class of both models, `checkpoints/pretrained.py`, holds what transformers expects there: loading, saving,
quantization, sharding.
"""

from __future__ import annotations

from .checkpoints.model_identity import XAttnIdentityMixin
from .learning.activation_wrappers import XAttnRecomputingMixin
from .learning.stand_in import XAttnStandInMixin
from .packing.packed_rows import XAttnPackingMixin
from .parts import grid_code, perceiver, position_bias, tiles
from .parts.image_positions import XAttnNumberingMixin
from .storage import int8_states
from .storage.model_store import XAttnStoreDelegationMixin, XAttnStoreMixin


# These register themselves, by the names that a configuration, or `cache_dtype`, has for them.
REGISTERED = (grid_code, int8_states, perceiver, position_bias, tiles)


class XAttnExtrasMixin(
    XAttnStoreMixin,
    XAttnStandInMixin,
    XAttnIdentityMixin,
    XAttnNumberingMixin,
    XAttnPackingMixin,
    XAttnRecomputingMixin,
):
    """The extras of [`XAttnModel`]."""


class XAttnOuterExtrasMixin(XAttnStoreDelegationMixin):
    """The extras of [`XAttnForConditionalGeneration`]."""
