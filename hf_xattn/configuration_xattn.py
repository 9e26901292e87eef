"""Configurations of the cross-attention block, of the perceiver resampler and of the whole model.

As in transformers, `@strict` checks the type and the range of each field. In addition, these classes check constraints
between fields, so that a wrong value raises an error before weights are allocated.
"""

from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.type_validators import positive_int_field

from .utils.architectures import shared_size, text_hidden_size, text_num_hidden_layers, vision_feature_size
from .utils.config_checks import (
    CheckedConfig,
    check_buckets,
    check_features,
    check_layers,
    check_names,
    check_parts,
    check_token_id,
    config_of_fields,
    every_nth_layer,
    finite,
    not_negative,
    positive,
    share,
)
from .utils.custom_code import UnreadConfig, read_config, read_parts
from .utils.parts import CONNECTORS, GATES, POSITIONS
from .utils.transformers_api import SubConfigSpec


# Default of a field that `__post_init__` fills in. Such a field has two types: transformers checks the type that a
# caller may pass (None, a `dict`), and type checkers read the type that the field has after `__post_init__`.
TO_BE_FILLED_IN: Any = None


def _is_left_out(value: object) -> bool:  # type checkers would think that an inline check is always false
    return value is None


@strict
class CrossAttentionConfig(CheckedConfig):
    r"""Configuration of a gated cross-attention block: queries come from the text, keys and values from the images.

    All blocks of a model share one configuration. In the `cross_attention` of [`retrofit`], leave out the sizes that
    the block should take from the text model.

    Args:
        hidden_size (`int`, defaults to 768): Width of the hidden states of the text. In a model it must be the text
            model's width.
        context_size (`int`, *optional*, defaults to `hidden_size`): Width of the image tokens. Set it if you pass
            features of another width as `cross_attention_states`, or for a smaller connector.
        num_attention_heads (`int`, defaults to 12): Number of query heads.
        num_key_value_heads (`int`, *optional*, defaults to `num_attention_heads`): Number of K/V heads: as many as
            query heads for MHA, 1 for MQA, another divisor for GQA. Fewer K/V heads make the cache smaller.
        head_dim (`int`, *optional*, defaults to `hidden_size // num_attention_heads`): Width of a head. The product of
            `head_dim` and `num_attention_heads` may differ from `hidden_size`.
        intermediate_size (`int`, *optional*, defaults to `4 * hidden_size`): Inner width of the MLP.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLP, by its name in transformers.
        mlp_type (`str`, defaults to `"gated"`): The second branch of the block. `"gated"`: an MLP
            `down(act(gate(x)) * up(x))`, which is SwiGLU with `silu`. `"plain"`: an MLP `down(act(up(x)))`. `"none"`:
            no second branch, for a smaller block; `intermediate_size` and `hidden_act` then have no effect.
        norm_type (`str`, defaults to `"rmsnorm"`): Kind of the norms in front of the branches, and of `context_norm`:
            `"rmsnorm"` or `"layernorm"`.
        norm_eps (`float`, defaults to 1e-6): Epsilon of these norms.
        attention_bias (`bool`, defaults to `False`): Whether the q, k, v and o projections have biases.
        mlp_bias (`bool`, defaults to `False`): Whether the projections of the MLP have biases.
        attention_dropout (`float`, defaults to 0.0): Dropout probability of the attention weights in training.
        gate (`str`, defaults to `"tanh"`; [`retrofit`] sets `"token"`): The factor of each branch. `"token"`: each text
            token computes its own factor, `sigmoid(score of its hidden state)`, so text that has nothing to do with
            the image can ignore it. `"tanh"`: `tanh` of a trained weight, the same for all tokens, as in Flamingo.
            `"none"`: no factor. Or the name of a gate of your own ([`register_gate`]).
        gate_options (`dict`, *optional*): Options of a gate of your own, which reads them from here.
        gate_granularity (`str`, defaults to `"scalar"`): Shape of the gate `"tanh"`: `"scalar"` for one number, or
            `"channel"` for one number for each channel of the hidden states. Other gates ignore it.
        gate_init (`float`, defaults to 1.0): First value of the gate, before `tanh` or `sigmoid`. To start as Flamingo
            does, set it to 0.0 together with `gate="tanh"` and `zero_init=False`.
        zero_init (`bool`, defaults to `True`): Whether `o_proj` and the MLP's `down_proj` start at zero, so that a
            fresh block changes nothing.
        qk_norm (`bool`, defaults to `False`): Whether queries and keys get an RMSNorm over `head_dim`, which bounds
            the attention scores.
        qk_norm_eps (`float`, *optional*, defaults to `norm_eps`): Epsilon of these two norms.
        context_norm (`bool`, defaults to `False`): Whether the image tokens get a norm before the K/V projections. Use
            it for features whose size varies.
        quiet_softmax (`bool`, defaults to `False`): Whether the attention weights are `exp(x) / (1 + sum(exp(x)))`,
            which lets a head attend to nothing (E. Miller, "Attention Is Off By One", 2023).
        position_bias (`bool`, defaults to `False`): Whether the scores get T5's relative position bias. Use it for
            features with an order (sound, video), and not for images. Tokens that are padding for their whole row are
            not counted. Tokens that a mask hides only from some text tokens are counted.
        position_bias_num_buckets (`int`, defaults to 32): Number of buckets of the position bias, as in T5.
        position_bias_max_distance (`int`, defaults to 128): All larger distances share the last bucket, as in T5.
        position (`str`, defaults to `"none"`): Name of a position encoding of your own ([`register_position`]).
        position_options (`dict`, *optional*): Options of this position encoding, which reads them from here.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the random first weights.

    Raises:
        StrictDataclassFieldValidationError: of `huggingface_hub`, if a field has a wrong type or is outside its range.
        ValueError: for an unknown activation, gate or position encoding, if `num_key_value_heads` does not divide
            `num_attention_heads`, or if gate and projection both start at zero, since neither would learn.

    Example:

    ```python
    >>> from hf_xattn import CrossAttentionConfig, GatedCrossAttentionBlock

    >>> config = CrossAttentionConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, gate="token")
    >>> config.head_dim, config.context_size, config.intermediate_size
    (16, 64, 256)
    >>> block = GatedCrossAttentionBlock(config)
    ```
    """

    model_type = "xattn_block"
    base_config_key = "cross_attention_config"

    hidden_size: int = positive_int_field(default=768)
    num_attention_heads: int = positive_int_field(default=12)
    if TYPE_CHECKING:
        context_size: int = TO_BE_FILLED_IN
        num_key_value_heads: int = TO_BE_FILLED_IN
        head_dim: int = TO_BE_FILLED_IN
        intermediate_size: int = TO_BE_FILLED_IN
        qk_norm_eps: float = TO_BE_FILLED_IN
    else:
        context_size: int | None = positive_int_field(default=None)
        num_key_value_heads: int | None = positive_int_field(default=None)
        head_dim: int | None = positive_int_field(default=None)
        intermediate_size: int | None = positive_int_field(default=None)
        qk_norm_eps: float | int | None = positive(default=None)
    hidden_act: str = "silu"
    mlp_type: Literal["gated", "plain", "none"] = "gated"
    norm_type: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float | int = positive(default=1e-6)
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float | int = share(default=0.0)
    gate: str = "tanh"
    gate_options: dict | None = None
    gate_granularity: Literal["scalar", "channel"] = "scalar"
    gate_init: float | int = finite(default=1.0)
    zero_init: bool = True
    qk_norm: bool = False
    context_norm: bool = False
    quiet_softmax: bool = False
    position_bias: bool = False
    position_bias_num_buckets: int = positive_int_field(default=32)
    position_bias_max_distance: int = positive_int_field(default=128)
    position: str = "none"
    position_options: dict | None = None
    initializer_range: float | int = not_negative(default=0.02)

    def __post_init__(self, **kwargs):
        check_names(type(self), kwargs)
        if _is_left_out(self.context_size):
            self.context_size = self.hidden_size
        if _is_left_out(self.num_key_value_heads):
            self.num_key_value_heads = self.num_attention_heads
        if _is_left_out(self.head_dim):
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"`num_attention_heads` ({self.num_attention_heads}) does not divide `hidden_size` "
                    f"({self.hidden_size}). Set `head_dim`, or set `num_attention_heads` to a divisor of `hidden_size`."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if _is_left_out(self.intermediate_size):
            self.intermediate_size = 4 * self.hidden_size
        if _is_left_out(self.qk_norm_eps):
            self.qk_norm_eps = self.norm_eps
        self._check_fields()
        super().__post_init__(**kwargs)

    def _check_fields(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` ({self.num_key_value_heads}) must divide `num_attention_heads` "
                f"({self.num_attention_heads})."
            )
        if self.mlp_type == "none" and self.mlp_bias:
            raise ValueError("Expected `mlp_bias=False` with `mlp_type='none'`, a block without an MLP, got True.")
        GATES.check(self.gate, self.gate_options)
        POSITIONS.check(self.position, self.position_options)
        if self.position_bias:
            check_buckets(self.position_bias_num_buckets, self.position_bias_max_distance)
        if self.gate_starts_at_zero and self.zero_init:
            raise ValueError(
                f"A gate that starts at zero (`gate={self.gate!r}`, `gate_init={self.gate_init + 0.0}`) together with "
                "`zero_init=True` starts both factors of each branch at zero. The gradient of each factor is "
                "proportional to the other, so neither would learn. Set `zero_init=False` (as in Flamingo), a non-zero "
                "`gate_init`, or `gate='none'`."
            )

    @property
    def counts_text(self) -> bool:
        """Whether the blocks read the positions of text tokens."""
        return self.position_bias or self.position != "none"

    @property
    def starts_at_identity(self) -> bool:
        """Whether a fresh block leaves the hidden states unchanged, because one factor of each branch is zero."""
        return self.zero_init or self.gate_starts_at_zero

    @property
    def gate_starts_at_zero(self) -> bool:
        """Whether a fresh gate returns zero: with `gate_init=0.0`, or if the class of your own gate says so."""
        return self.gate_init == 0.0 if self.gate == "tanh" else GATES.starts_at_zero(self.gate)


@strict
class PerceiverConfig(CheckedConfig):
    r"""Configuration of the connector `"perceiver"`, a perceiver resampler (see `parts/perceiver.py`).

    The resampler turns the features of each image into `num_latents` image tokens. Choose it to make the cache of large
    images smaller.

    Args:
        hidden_size (`int`, *optional*): Width of the latents and of the image tokens. Inside an [`XAttnConfig`] it is
            the width of the vision tower's features, and may be left out.
        num_latents (`int`, defaults to 64): Number of image tokens of each image.
        num_image_positions (`int`, defaults to 0): Number of learned position encodings of images, as in
            flamingo-pytorch (`media_pos_emb`). The n-th image of a row, or of a sample in a packed row, gets the n-th
            one, added to its features. A row can have at most this many images. With 0, all images of a row are
            encoded alike, whatever their order.
        num_hidden_layers (`int`, defaults to 6): Number of layers, each with an attention and an MLP.
        num_attention_heads (`int`, defaults to 8): Number of attention heads of a layer.
        head_dim (`int`, defaults to 64): Width of a head.
        intermediate_size (`int`, *optional*, defaults to `4 * hidden_size`): Inner width of the MLP.
        hidden_act (`str`, defaults to `"gelu"`): Activation of the MLP, by its name in transformers.
        qk_norm (`bool`, defaults to `False`): Whether queries and keys get a LayerNorm over `head_dim`.
        norm_eps (`float`, defaults to 1e-5): Epsilon of all norms.

    Raises:
        StrictDataclassFieldValidationError: of `huggingface_hub`, if a field has a wrong type or is outside its range.
        ValueError: for an unknown activation.

    Example:

    ```python
    >>> import hf_xattn

    >>> config = hf_xattn.PerceiverConfig(num_latents=16, num_hidden_layers=2)
    >>> model = hf_xattn.retrofit(
    ...     "HuggingFaceTB/SmolLM2-135M-Instruct",
    ...     "google/siglip-base-patch16-224",
    ...     connector_type="perceiver",
    ...     perceiver_config=config,
    ... )
    ```
    """

    model_type = "xattn_perceiver"
    base_config_key = "perceiver_config"

    if TYPE_CHECKING:
        hidden_size: int = TO_BE_FILLED_IN  # [`XAttnConfig`] fills it in if `__post_init__` does not
        intermediate_size: int = TO_BE_FILLED_IN
    else:
        hidden_size: int | None = positive_int_field(default=None)
        intermediate_size: int | None = positive_int_field(default=None)
    num_latents: int = positive_int_field(default=64)
    num_image_positions: int = not_negative(default=0)
    num_hidden_layers: int = positive_int_field(default=6)
    num_attention_heads: int = positive_int_field(default=8)
    head_dim: int = positive_int_field(default=64)
    hidden_act: str = "gelu"
    qk_norm: bool = False
    norm_eps: float | int = positive(default=1e-5)

    def __post_init__(self, **kwargs):
        check_names(type(self), kwargs)
        if not _is_left_out(self.hidden_size) and _is_left_out(self.intermediate_size):
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)


@strict
class XAttnConfig(CheckedConfig):
    r"""Configuration of a text model with gated cross-attention blocks, and optionally a vision tower.

    [`retrofit`] makes one from its arguments of the same names.

    Args:
        text_config (`PreTrainedConfig` or `dict`): Configuration of the text model, a causal language model.
        vision_config (`PreTrainedConfig` or `dict`, *optional*): Configuration of the vision tower, a vision model of
            transformers whose output has `last_hidden_state`. Without it, the model has no vision tower, and takes
            `cross_attention_states` in place of pixels.
        cross_attention_config ([`CrossAttentionConfig`] or `dict`, *optional*): Configuration of the blocks. The sizes
            that a `dict` leaves out are those of the text model.
        cross_attention_layers (`list[int]`, *optional*): Indices, from 0, of the decoder layers that get a block in
            front; by default every 4th layer: 3, 7, 11, ... If an index is repeated, the layer gets several blocks,
            one after the other. The number of layers, as an index, puts a block after the last layer.
        image_token_id (`int`, *optional*): Id of the image marker, the token that says where an image stands in the
            text. Every `image_visibility` but `"all"` needs it.
        image_visibility (`str`, defaults to `"all"`): Which images of its row a text token sees. `"all"`: every image.
            `"previous"`: the images whose markers stand before the token. `"latest"`: the last of these (as in
            Flamingo and Idefics). `"latest_group"`: the last of these, and the images whose markers directly precede
            its marker (as in Mllama).
        additional_vocab_size (`int`, defaults to 0): Number of tokens that are added after the text model's
            vocabulary. Set it if the vocabulary has no token that can be the image marker.
        additional_vocab_in_head (`bool`, defaults to `False`): Whether the model can also generate the added tokens.
        additional_vocab_scaled (`bool`, defaults to `True`): Whether a text model that scales or normalizes its
            embeddings (Gemma, Inkling) does so with the added rows, too. False in saved files without this field.
        source_config (`dict`, *optional*): Configuration of the Mllama or Idefics checkpoint that the model was
            imported from. The importer sets it.
        connector_type (`str`, defaults to `"mlp"`; [`retrofit`] may choose `"mlp_2d"`): The module that maps the
            features of the tower to image tokens. `"mlp"`: two linear layers. `"mlp_2d"`: the same, and a position
            encoding of the row and the column in a square image. `"linear"`: one linear layer. `"identity"`: nothing.
            `"perceiver"`: a resampler. Or the name of a connector of your own ([`register_connector`]).
        connector_options (`dict`, *optional*): Options of a connector of your own, which reads them from here.
        vision_feature_select_strategy (`str`, defaults to `"full"`): Which tokens of the tower are used. `"full"`: all.
            `"default"`: all but the first one, for towers with a class token (as in Llava).
        vision_feature_layer (`int` or `list[int]`, *optional*): The hidden states of the tower that are used, as in
            Llava: 0 are the embeddings, -2 are those in front of the last layer. The hidden states of several layers
            are joined along the width. By default, `last_hidden_state` is used.
        vision_hidden_size (`int`, *optional*): Width of the tower's `last_hidden_state`. [`retrofit`] measures it. By
            default it is the `hidden_size` of `vision_config`, or the last of its `hidden_sizes`.
        perceiver_config ([`PerceiverConfig`] or `dict`, *optional*): Configuration of the connector `"perceiver"`. With
            another connector it must be None.
        connector_hidden_act (`str`, defaults to `"gelu"`): Activation of the connectors `"mlp"` and `"mlp_2d"`.
        connector_bias (`bool`, defaults to `True`): Whether the linear layers of the connectors `"linear"`, `"mlp"` and
            `"mlp_2d"` have biases.

    Raises:
        StrictDataclassFieldValidationError: of `huggingface_hub`, if a field has a wrong type or is outside its range.
        ValueError: if a layer index is out of range, if the hidden size of the blocks differs from the text model's, or
            if a field requires another one that is missing.

    Example:

    ```python
    >>> from transformers import LlamaConfig, SiglipVisionConfig

    >>> from hf_xattn import XAttnConfig, XAttnForConditionalGeneration

    >>> config = XAttnConfig(
    ...     text_config=LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4),
    ...     vision_config=SiglipVisionConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=2),
    ...     cross_attention_config={"gate": "token", "num_key_value_heads": 2},
    ... )
    >>> config.cross_attention_layers, config.cross_attention_config.hidden_size
    ([3, 7], 64)
    >>> model = XAttnForConditionalGeneration(config)  # with random weights
    ```
    """

    model_type = "xattn"
    values_of_old_files = {"additional_vocab_scaled": False}
    sub_configs_defaults = {
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama"),
        "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="siglip_vision_model", optional=True),
        "cross_attention_config": SubConfigSpec(config_class=CrossAttentionConfig, optional=True),
        "perceiver_config": SubConfigSpec(config_class=PerceiverConfig, optional=True),
    }

    if TYPE_CHECKING:
        text_config: PreTrainedConfig = TO_BE_FILLED_IN
        vision_config: PreTrainedConfig | None = None
        cross_attention_config: CrossAttentionConfig = TO_BE_FILLED_IN
        cross_attention_layers: list[int] = TO_BE_FILLED_IN
        perceiver_config: PerceiverConfig | None = None
    else:
        text_config: dict | PreTrainedConfig | None = None
        vision_config: dict | PreTrainedConfig | None = None
        cross_attention_config: dict | PreTrainedConfig | None = None
        cross_attention_layers: list[int] | tuple[int, ...] | range | set[int] | None = None
        perceiver_config: dict | PreTrainedConfig | None = None
    image_token_id: int | None = None
    image_visibility: Literal["all", "previous", "latest", "latest_group"] = "all"
    additional_vocab_size: int = not_negative(default=0)
    additional_vocab_in_head: bool = False
    additional_vocab_scaled: bool = True
    connector_type: str = "mlp"
    connector_options: dict | None = None
    connector_hidden_act: str = "gelu"
    connector_bias: bool = True
    vision_feature_select_strategy: Literal["full", "default"] = "full"
    vision_feature_layer: int | list[int] | tuple[int, ...] | None = None
    vision_hidden_size: int | None = positive_int_field(default=None)
    source_config: dict | None = None

    def __post_init__(self, **kwargs):
        check_names(type(self), kwargs)
        # Keep the attention and experts implementations of sub-configurations that are objects already. The setter of
        # the parent class resets them to None, and with None some decoders silently lose their causal mask.
        live = {
            name: (config, config._attn_implementation, config._experts_implementation)
            for name in self.sub_configs
            if isinstance(config := getattr(self, name), PreTrainedConfig)
        }
        asked_attn, asked_experts = kwargs.get("attn_implementation"), kwargs.get("experts_implementation")
        check_parts("attn_implementation", asked_attn, self.sub_configs)
        check_parts("experts_implementation", asked_experts, self.sub_configs)
        if not isinstance(self.text_config, (dict, PreTrainedConfig)):
            raise ValueError(
                "Expected `text_config` to be the configuration of a causal language model, got "
                f"{type(self.text_config).__name__}."
            )
        perceiver: Any = self.perceiver_config
        if isinstance(perceiver, dict):
            self.perceiver_config = config_of_fields("perceiver_config", PerceiverConfig, perceiver)
        given, self.cross_attention_config = self.cross_attention_config, TO_BE_FILLED_IN
        self.text_config, self.vision_config = read_config(self.text_config), read_config(self.vision_config)
        super().__post_init__(**kwargs)
        if given is None or isinstance(given, dict):
            given = complete_cross_attention_config(given, self.text_config)
        block = self.cross_attention_config = given
        for name, (config, attn, experts) in live.items():
            if asked_attn is None:
                config._attn_implementation = attn
            if asked_experts is None:
                config._experts_implementation = experts
            if name == "text_config" and _says_nothing_of("", asked_attn):
                self._attn_implementation_internal = attn
            if name == "text_config" and _says_nothing_of("", asked_experts):
                self._experts_implementation_internal = experts
        if not _says_nothing_of("cross_attention_config", asked_attn):
            of_block = asked_attn["cross_attention_config"] if isinstance(asked_attn, dict) else asked_attn
            block._attn_implementation = of_block
        elif block._attn_implementation is None and "text_config" in live:
            block._attn_implementation = live["text_config"][1]
        read_parts(self)
        self._check_fields()

    def read_custom_code(self) -> None:
        """Reads configurations and parts whose code is custom, if [`trusting`] allows to run that code."""
        read_parts(self)
        if isinstance(self.text_config, UnreadConfig) or isinstance(self.vision_config, UnreadConfig):
            self.text_config, self.vision_config = read_config(self.text_config), read_config(self.vision_config)
            self._check_fields()

    def to_dict(self) -> dict[str, Any]:
        """`PreTrainedConfig.to_dict`, without the `quantization_config` of the text model.

        The whole model has a `quantization_config`, with the names that the modules have in it.
        """
        fields = super().to_dict()
        (fields["text_config"] or {}).pop("quantization_config", None)
        return fields

    def _check_fields(self) -> None:
        CONNECTORS.check(self.connector_type, self.connector_options)
        if isinstance(self.text_config, UnreadConfig) or isinstance(self.vision_config, UnreadConfig):
            return  # checked after their code has run, because it may name the sizes in other ways
        num_layers = text_num_hidden_layers(self.text_config)
        if _is_left_out(self.cross_attention_layers):
            self.cross_attention_layers = every_nth_layer(4, num_layers)
        self.cross_attention_layers = check_layers(self.cross_attention_layers, num_layers)
        check_features(self)
        width = text_hidden_size(self.text_config)
        if self.cross_attention_config.hidden_size != width:
            raise ValueError(
                f"Expected `cross_attention_config.hidden_size` to be the text model's hidden size ({width}), got "
                f"{self.cross_attention_config.hidden_size}. Leave it out to take that of the text model."
            )
        self._check_perceiver()
        if self.vision_config is not None and self.connector_type in ("identity", "perceiver"):
            features = vision_feature_size(self)
            if features != self.cross_attention_config.context_size:
                raise ValueError(
                    f"Expected `cross_attention_config.context_size` to be the vision tower's width ({features}), "
                    f"because of `connector_type={self.connector_type!r}`, got "
                    f"{self.cross_attention_config.context_size}."
                )
        if self.image_visibility != "all" and self.image_token_id is None:
            raise ValueError(
                f"`image_visibility={self.image_visibility!r}` depends on the image markers in the text: expected "
                "`image_token_id` to be set, got None. Set it to the id of the marker, or use 'all'."
            )
        known = getattr(self.text_config.get_text_config(), "vocab_size", None)
        last = None if known is None else known + self.additional_vocab_size
        check_token_id("image_token_id", self.image_token_id, last)

    def _check_perceiver(self) -> None:
        if self.connector_type != "perceiver":
            if self.perceiver_config is not None:
                raise ValueError(f"`perceiver_config` needs `connector_type='perceiver'`, got {self.connector_type!r}.")
            return
        if self.vision_config is None:
            raise ValueError("`connector_type='perceiver'` needs a `vision_config`, got None.")
        width = vision_feature_size(self)
        perceiver = self.perceiver_config
        if perceiver is None or _is_left_out(perceiver.hidden_size):
            fields = {} if perceiver is None else perceiver.to_dict()
            self.perceiver_config = PerceiverConfig(**{**fields, "hidden_size": width})
        elif perceiver.hidden_size != width:
            raise ValueError(
                f"`perceiver_config.hidden_size` ({perceiver.hidden_size}) must be the vision tower's width ({width})."
            )


def _says_nothing_of(part: str, asked: str | dict | None) -> bool:
    """Whether a value of `attn_implementation` or `experts_implementation` names no kernel for a part of the model.

    The part `""` is the whole model.
    """
    return asked is None or (isinstance(asked, dict) and part not in asked)


def complete_cross_attention_config(partial: dict | None, text_config: PreTrainedConfig) -> CrossAttentionConfig:
    """Makes a [`CrossAttentionConfig`], and takes the sizes that `partial` leaves out from the text model."""
    decoder = text_config.get_text_config(decoder=True)
    fields = dict(partial or {})
    if "model_type" in fields:  # `to_dict` has made it, so it is complete
        return CrossAttentionConfig.from_dict(fields)
    fields.setdefault("hidden_size", text_hidden_size(text_config))
    if "num_attention_heads" not in fields:
        default = max(1, fields["hidden_size"] // 64)
        heads = fields["num_attention_heads"] = shared_size(decoder, "num_attention_heads") or default
        kv_heads = shared_size(decoder, "num_key_value_heads")
        if "num_key_value_heads" not in fields and kv_heads and heads % kv_heads == 0:
            fields["num_key_value_heads"] = kv_heads
        head_dim = shared_size(decoder, "head_dim")
        if "head_dim" not in fields and head_dim:
            fields["head_dim"] = head_dim
    if "head_dim" not in fields and fields["num_attention_heads"]:
        fields["head_dim"] = max(1, fields["hidden_size"] // fields["num_attention_heads"])
    if "intermediate_size" not in fields:
        fields["intermediate_size"] = shared_size(decoder, "intermediate_size") or 4 * fields["hidden_size"]
    if "initializer_range" not in fields and isinstance(getattr(decoder, "initializer_range", None), float):
        fields["initializer_range"] = decoder.initializer_range
    return config_of_fields("cross_attention", CrossAttentionConfig, fields)
