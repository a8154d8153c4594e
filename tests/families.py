"""Tiny random models, one row per kind of cache and decoder, for the shared test matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

# At this size several threads only wait for each other, badly so when the cores are shared.
torch.set_num_threads(1)

VOCAB_SIZE = 256
SLIDING_WINDOW = 8

FULL = "DynamicLayer"
SLIDING = "DynamicSlidingWindowLayer"
LINEAR = "LinearAttentionLayer"
LINEAR_AND_FULL = "LinearAttentionAndFullAttentionLayer"
SHARED = "DummyLayer"

_TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DECODER: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
_RECURRENT_THEN_FULL = ["linear_attention", "full_attention"]
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


@dataclass(frozen=True)
class Family:
    """One architecture of the test matrix.

    Args:
        name (`str`): Key in `FAMILIES`.
        builder (`Callable[[], PreTrainedModel]`): Makes the model; the caller seeds the generator.
        cache_kinds (`str`): What the cache holds, e.g. `"recurrent+full"`.
        cache_layers (`tuple[str, ...]`): Class name of every layer of the cache, in order.
        embedding_scale (`float`): Factor on the input embeddings. The larger it is, the more the
            next token follows from the last one alone and the sooner greedy output cycles.
        multi_token_exact (`bool`): Whether one forward over several tokens on a filled cache
            gives the logits of as many single steps.
    """

    name: str
    builder: Callable[[], PreTrainedModel] = field(repr=False)
    cache_kinds: str
    cache_layers: tuple[str, ...]
    embedding_scale: float = 1.0
    multi_token_exact: bool = True

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer keeps a state that cannot be cropped."""
        return "recurrent" in self.cache_kinds


def _builder(
    prefix: str,
    config_suffix: str = "Config",
    model_suffix: str = "ForCausalLM",
    **fields: Any,
) -> Callable[[], PreTrainedModel]:
    """Return a function that builds a causal language model from its config class."""

    def build() -> PreTrainedModel:
        config: PreTrainedConfig = getattr(transformers, prefix + config_suffix)(**fields)
        model_class = getattr(transformers, prefix + model_suffix)
        model: PreTrainedModel = model_class(config)
        return model

    return build


_ROWS = (
    Family(
        "llama",
        _builder("Llama", **_DECODER),
        "full",
        (FULL,) * 2,
        embedding_scale=96,
    ),
    Family(
        "qwen3",
        _builder("Qwen3", **{**_DECODER, "initializer_range": 0.5}, head_dim=8),
        "full",
        (FULL,) * 2,
        embedding_scale=96,
    ),
    Family(
        "qwen3_moe",
        _builder(
            "Qwen3Moe",
            **_DECODER,
            head_dim=8,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        "full",
        (FULL,) * 2,
        embedding_scale=32,
    ),
    Family(
        "mistral",
        _builder("Mistral", **_DECODER, sliding_window=SLIDING_WINDOW),
        "sliding",
        (SLIDING,) * 2,
        embedding_scale=64,
    ),
    Family(
        "gemma2",
        _builder(
            "Gemma2",
            **_DECODER,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=SLIDING_WINDOW,
            layer_types=_SLIDING_THEN_FULL,
        ),
        "sliding+full",
        (SLIDING, FULL),
        embedding_scale=8,
    ),
    Family(
        "gemma3",
        _builder(
            "Gemma3",
            "TextConfig",
            **_DECODER,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=SLIDING_WINDOW,
            layer_types=_SLIDING_THEN_FULL,
        ),
        "sliding+full",
        (SLIDING, FULL),
        embedding_scale=8,
    ),
    Family(
        "gemma4",
        _builder(
            "Gemma4",
            "TextConfig",
            **{**_DECODER, "num_hidden_layers": 6},
            head_dim=8,
            global_head_dim=8,
            sliding_window=SLIDING_WINDOW,
            layer_types=_SLIDING_THEN_FULL * 3,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=8,
        ),
        "sliding+full, shared",
        (SLIDING, FULL) * 2 + (SHARED,) * 2,
        embedding_scale=12,
    ),
    Family(
        "gpt_oss",
        _builder(
            "GptOss",
            **_DECODER,
            head_dim=8,
            sliding_window=SLIDING_WINDOW,
            layer_types=_SLIDING_THEN_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "sliding+full, sinks",
        (SLIDING, FULL),
        embedding_scale=96,
    ),
    Family(
        "deepseek_v3",
        _builder(
            "DeepseekV3",
            **{**_DECODER, "num_key_value_heads": 4},
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            num_mtp_layers=0,
        ),
        "full, latent",
        (FULL,) * 2,
        embedding_scale=32,
    ),
    Family(
        "smollm3",
        _builder("SmolLM3", **_DECODER, no_rope_layers=[1, 0]),
        "full",
        (FULL,) * 2,
        embedding_scale=64,
    ),
    Family(
        "phi3",
        _builder("Phi3", **_DECODER),
        "full",
        (FULL,) * 2,
        embedding_scale=96,
    ),
    Family(
        "olmo3",
        _builder(
            "Olmo3", **_DECODER, sliding_window=SLIDING_WINDOW, layer_types=_SLIDING_THEN_FULL
        ),
        "sliding+full",
        (SLIDING, FULL),
        embedding_scale=48,
    ),
    Family(
        "glm4_moe",
        _builder(
            "Glm4Moe",
            **_DECODER,
            head_dim=8,
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            use_qk_norm=True,
            num_mtp_layers=0,
        ),
        "full",
        (FULL,) * 2,
        embedding_scale=24,
    ),
    Family(
        "gpt2",
        _builder(
            "GPT2",
            model_suffix="LMHeadModel",
            **_TOKENS,
            tie_word_embeddings=False,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=4096,
            initializer_range=0.3,
        ),
        "full",
        (FULL,) * 2,
        embedding_scale=48,
    ),
    Family(
        "qwen3_5",
        _builder(
            "Qwen3_5",
            "TextConfig",
            **_DECODER,
            **_DELTA_NET,
            head_dim=16,
            layer_types=_RECURRENT_THEN_FULL,
        ),
        "recurrent+full",
        (LINEAR, FULL),
        embedding_scale=48,
    ),
    Family(
        "qwen3_next",
        _builder(
            "Qwen3Next",
            **_DECODER,
            **_DELTA_NET,
            head_dim=16,
            layer_types=_RECURRENT_THEN_FULL,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        "recurrent+full",
        (LINEAR, FULL),
        embedding_scale=48,
    ),
    Family(
        "lfm2",
        _builder(
            "Lfm2",
            **_DECODER,
            block_multiple_of=16,
            layer_types=["conv", "full_attention"],
        ),
        "conv+full",
        (LINEAR, FULL),
        embedding_scale=48,
    ),
    Family(
        "mamba2",
        _builder(
            "Mamba2",
            **_TOKENS,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=16,
            state_size=8,
            n_groups=1,
            conv_kernel=4,
            expand=2,
            chunk_size=16,
            initializer_range=0.3,
        ),
        "recurrent",
        (LINEAR,) * 2,
        embedding_scale=16,
    ),
    Family(
        "granitemoehybrid",
        _builder(
            "GraniteMoeHybrid",
            **{**_DECODER, "initializer_range": 0.5},
            **_MAMBA,
            layer_types=_RECURRENT_THEN_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            position_embedding_type="rope",
        ),
        "recurrent+full",
        (LINEAR, FULL),
        embedding_scale=128,
    ),
    Family(
        "falcon_h1",
        _builder("FalconH1", **_DECODER, **_MAMBA, mamba_d_ssm=64),
        "recurrent+full in one layer",
        (LINEAR_AND_FULL,) * 2,
        embedding_scale=128,
    ),
    Family(
        "jamba",
        _builder(
            "Jamba",
            **_DECODER,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
        "recurrent+full",
        (LINEAR, FULL),
        embedding_scale=64,
        multi_token_exact=False,
    ),
    Family(
        "nemotron_h",
        _builder(
            "NemotronH",
            **{k: v for k, v in _DECODER.items() if k != "num_hidden_layers"},
            head_dim=8,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=16,
            # The block form clamps the time step to this minimum, the single step does not.
            time_step_min=2.0,
            time_step_max=4.0,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
        "recurrent+full, dummy",
        (LINEAR, SHARED, FULL, SHARED),
        embedding_scale=4,
        multi_token_exact=False,
    ),
)

FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}


@functools.cache
def build_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Build one tiny random model: fp32, CPU, eval mode, no EOS token.

    The result is cached and shared between tests, so a test that changes it must undo that.

    Args:
        family (`str`): A key of `FAMILIES`.
        seed (`int`): Seed of the weights; the global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family].builder().float().eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(FAMILIES[family].embedding_scale)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_prompt(model: PreTrainedModel, length: int, seed: int) -> torch.LongTensor:
    """Return a prompt [1, length] of random tokens, none of which is the pad token 0."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(1, vocab_size, (1, length), generator=generator)
