"""Tiny random models on disk, for the command line to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizers import family_tokenizer, plain_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ssr_hf import ThinkingBudgetLogitsProcessor, ThinkingMarkers

CONTEXT = 1024
THINKING = "deepseek_r1"  # its chat template opens thinking


class Oracle:
    """Plain `generate` of a model on disk: what the command line has to write.

    Args:
        directory (`Path`): Where the model is.
    """

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def new_tokens(self, prompt: str, n_tokens: int, budget: int, **settings: Any) -> list[int]:
        """The new tokens, with thinking ended after `budget` of them."""
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        markers = ThinkingMarkers.from_tokenizer(self.tokenizer)
        limit = ThinkingBudgetLogitsProcessor(markers, budget, ids.shape[1])
        output = self.model.generate(
            ids, max_new_tokens=n_tokens, logits_processor=[limit], **settings
        )
        return output[0, ids.shape[1] :].tolist()

    def text(self, prompt: str, n_tokens: int, budget: int, **settings: Any) -> str:
        """The same as text, special tokens left out."""
        ids = self.new_tokens(prompt, n_tokens, budget, **settings)
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def save_model(directory: Path, tokenizer: Any, **settings: Any) -> Path:
    """Saves a random Qwen3 of two layers that fits `tokenizer`; `settings` go into its config."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    model = Qwen3ForCausalLM(config)
    # The next token then follows from the last one alone, so that text repeats and drafts hold.
    model.get_input_embeddings().weight.data *= 64
    # One block of thinking: the opening marker is never the likeliest token.
    if "<think>" in tokenizer.get_vocab():
        model.lm_head.weight.data[tokenizer.convert_tokens_to_ids("<think>")] = 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_thinking_model(directory: Path) -> Path:
    """A model whose tokenizer has `<think>` and `</think>`."""
    return save_model(directory, family_tokenizer(THINKING))


def save_model_without_stream(directory: Path) -> Path:
    """A thinking model whose rotary positions forbid a second thread, and so the stream lane."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return save_model(directory, family_tokenizer(THINKING), rope_parameters=rope)


def save_gguf(path: Path) -> Path:
    """A random Llama in GGUF; it has the vocabulary and chat template of the thinking model."""
    gguf = pytest.importorskip("gguf")
    tokenizer = family_tokenizer(THINKING)
    # The format has no place for an empty list of merges.
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"]
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 256 + [3] * (len(tokenizer) - 256) + [1])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    shapes = {
        "token_embd": (len(tokens), 32),
        "output": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (0.5 * torch.randn(shape)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_unmarked_model(directory: Path) -> Path:
    """A model whose tokenizer has no thinking markers."""
    return save_model(directory, plain_tokenizer())
