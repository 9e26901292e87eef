"""What the models can do beside the core: which extra stands in which place of it.

The core is what a reader needs to follow an image through `generate`: configuration, `layers`, `decoders`, `images`,
`cache`, and the files of the top level that end in `_xattn`. It imports nothing of its extras. It names places for
them, as methods that do nothing, and this file puts the extras there:

    find_source                          images that were encoded before, by content   storage/model_store.py
    images_of_nobody, zero_of_others     processes that wait for each other            learning/stand_in.py
    image_identity                       whose weights have encoded a cache's images   checkpoints/model_identity.py

The base class of both models, `checkpoints/pretrained.py`, holds what transformers expects there: loading, saving,
quantization, sharding.
"""

from __future__ import annotations

from .checkpoints.model_identity import XAttnIdentityMixin
from .learning.stand_in import XAttnStandInMixin
from .storage.model_store import XAttnStoreDelegationMixin, XAttnStoreMixin


class XAttnExtrasMixin(XAttnStoreMixin, XAttnStandInMixin, XAttnIdentityMixin):
    """The extras of [`XAttnModel`]."""


class XAttnOuterExtrasMixin(XAttnStoreDelegationMixin):
    """The extras of [`XAttnForConditionalGeneration`]."""
