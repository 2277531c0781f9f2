"""Decoder configuration, read from a Hugging Face config.json of any version."""

from dataclasses import dataclass

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.config_fields import integer, number, object_of, optional_object, positive, soft_cap, switch
from sluice.engine.models.families import Family, family_of
from sluice.engine.text.json_files import Json
from sluice.kernels.decoder_shape import DecoderShape, MixtureShape
from sluice.kernels.gated_activation import Activation

_MOST_LAYERS = 10_000
_LONGEST_CONTEXT = 2**24

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "swiglu_clamped": "swiglu_clamped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its type and parameters."""

    type: str
    theta: float
    rotary_size: int
    """Elements of a head that are rotated."""

    parameters: Json
    """Further parameters of the config (factor, low_freq_factor, short_factor ...)."""

    max_position_embeddings: int
    original_max_position_embeddings: int
    """Context length of the pretraining, before the embedding was extended."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on the longest sequence that a worker allows."""
        return self.type in ("dynamic", "longrope")

    @property
    def longest_context(self) -> int:
        """The longest context: the config's, or longer if YaRN was enabled as model cards describe it."""
        stated = [self.parameters.get(name) for name in ("factor", "original_max_position_embeddings")]
        if self.type != "yarn" or None in stated:
            return self.max_position_embeddings
        original = integer(self.parameters, "original_max_position_embeddings", most=_LONGEST_CONTEXT)
        extended = original * positive(self.parameters, "factor", 1.0)
        return max(self.max_position_embeddings, int(min(extended, _LONGEST_CONTEXT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(DecoderShape):
    """One decoder, as its folder's config describes it."""

    rules: Family
    embedding_scale: float
    """Factor on the embedding, divided by that on what is added to the residual.

    The residual is kept divided by its multiplier: norms remove its scale, if epsilon has it, too.
    """

    is_tied: bool
    """Whether the output projection shares the embedding's weights."""

    sliding_windows: tuple[int, ...]
    """Sliding window per layer: a token attends to this many tokens, itself included. 0: all."""

    rotated_layers: tuple[bool, ...]
    """Whether each layer rotates queries and keys."""

    rope: RopeConfig
    local_rope: RopeConfig | None
    """Rotary embedding of layers with a window, if they have a separate one."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.sliding_windows)

    @property
    def window_of_all_layers(self) -> int:
        """Tokens beyond which no layer of this model attends; 0: some layer attends to all."""
        return max(self.sliding_windows) if all(self.sliding_windows) else 0


def parse_config(config: Json) -> DecoderConfig:
    """Read a parsed config.json.

    Raises:
        ModelFolderError: the family or a setting is not supported, or a size is missing.
    """
    family, config = _with_defaults(config)
    num_layers, hidden_size = integer(config, "num_hidden_layers", most=_MOST_LAYERS), integer(config, "hidden_size")
    num_heads, num_kv_heads, head_size = _heads(config, family, hidden_size)
    windows, mixture = family.sliding_windows(config, num_layers), _mixture_of(config, family, num_layers)
    rope, local_rope = _ropes_of(config, family, head_size)
    multipliers, eps = family.multipliers(config), positive(config, family.eps_name, 1e-6)
    return DecoderConfig(
        rules=family,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=0 if mixture and all(mixture.layers) else integer(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=eps / multipliers.residual**2,
        head_norm_eps=eps,
        norm_offset=family.norm_offset,
        is_norm_centered=family.is_norm_centered,
        has_pre_norms=family.norms.attention is not None,
        has_post_norms=family.norms.attention_post is not None,
        is_parallel=family.is_parallel,
        activation=_activation(config, family),
        attention_scale=head_size**-0.5 if multipliers.attention is None else multipliers.attention,
        has_sinks=family.has_sinks,
        attention_soft_cap=soft_cap(config, "attn_logit_softcapping"),
        final_soft_cap=soft_cap(config, "final_logit_softcapping"),
        logit_scale=multipliers.logits,
        embedding_scale=multipliers.embedding / multipliers.residual,
        is_tied=switch(config, "tie_word_embeddings"),
        has_qkv_bias=family.has_qkv_bias(config),
        has_output_bias=family.has_output_bias(config),
        has_mlp_bias=switch(config, "mlp_bias"),
        has_head_norm=family.has_head_norm,
        has_row_norm=family.has_row_norm,
        mixture=mixture,
        sliding_windows=windows,
        rotated_layers=family.rotated_layers(config, windows),
        rope=rope,
        local_rope=local_rope,
    )


def _with_defaults(config: Json) -> tuple[Family, Json]:
    family = family_of(config)
    return family, {**family.defaults, **config}


def _mixture_of(config: Json, family: Family, num_layers: int) -> MixtureShape | None:
    """Return the sizes of the experts; None if no layer has any."""
    shape = None if family.experts is None else family.experts.shape(config, num_layers)
    return shape if shape is not None and any(shape.layers) else None


def _heads(config: Json, family: Family, hidden_size: int) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key-value heads, and their size."""
    num_heads = integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelFolderError(f"config.json: {num_heads} heads are not a multiple of {num_kv_heads} key-value heads.")
    size = integer(config, "head_dim", family.default_head_size or hidden_size // num_heads)
    if size % 2:
        raise ModelFolderError(
            f"config.json: head_dim (or hidden_size divided by num_attention_heads) must be even, since rotary "
            f"embeddings rotate pairs of elements, got {size}."
        )
    return num_heads, num_kv_heads, size


def _ropes_of(config: Json, family: Family, head_size: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding, and that of layers with a window if it is another: scaling is only for the first."""
    local = family.local_rope
    if local is None:
        return _parse_rope(config, family, head_size), None
    given = config.get("rope_parameters")
    by_type = object_of(given)
    if (given is not None and not isinstance(given, dict)) or not by_type.keys() <= {
        "full_attention",
        "sliding_attention",
    }:
        raise ModelFolderError(
            f"config.json: rope_parameters must be given separately for full_attention and sliding_attention, "
            f"got {given!r}."
        )

    def rope(layer_type: str, theta: float, scaling: Json) -> RopeConfig:
        parameters = {"rope_theta": theta, **object_of(by_type.get(layer_type)), **scaling}
        return _parse_rope({**config, "rope_parameters": parameters}, family, head_size)

    theta, local_theta = number(config, "rope_theta", local.theta), number(config, local.theta_name, local.theta)
    return (
        rope("full_attention", theta, optional_object(config, "rope_scaling")),
        rope("sliding_attention", local_theta, {}),
    )


def _parse_rope(config: Json, family: Family, head_size: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5 and later), or `rope_theta` and `rope_scaling` (before)."""
    max_position_embeddings = integer(config, "max_position_embeddings", 2048, most=_LONGEST_CONTEXT)
    parameters = dict(optional_object(config, "rope_parameters") or optional_object(config, "rope_scaling"))
    theta = positive(parameters, "rope_theta", positive(config, "rope_theta", 10_000.0))
    name = "original_max_position_embeddings"
    original = integer(parameters, name, max_position_embeddings, most=_LONGEST_CONTEXT)
    name_of_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return RopeConfig(
        type=family.rope_types.get(name_of_type, name_of_type),
        theta=theta,
        rotary_size=_rotary_size(parameters, config, head_size),
        parameters=parameters,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=integer(config, name, original, most=_LONGEST_CONTEXT),
    )


def _rotary_size(parameters: Json, config: Json, head_size: int) -> int:
    name = "partial_rotary_factor"
    factor = positive(parameters, name, positive(config, name, 1.0))
    size = int(head_size * factor)
    if factor > 1 or size % 2 or size < 2:
        raise ModelFolderError(
            f"config.json: {name} must be at most 1 and rotate an even number of the {head_size} elements of a head, "
            f"got {factor:g}."
        )
    return size


def _activation(config: Json, family: Family) -> Activation:
    field = family.activation_name
    name = str(config.get(field, "silu"))
    name = family.activations.get(name, name)
    if name not in _ACTIVATIONS:
        raise ModelFolderError(f"config.json: {field} {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]
