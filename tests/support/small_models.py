"""Small configurations of real architectures, built by hand, with the names of their blocks.

Every model has 4 blocks per stack and hidden size 32. ``SMALL`` maps a name to a function that gives class, config and blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VOCAB, HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 96, 32, 4, 4, 48, 64
Small = tuple[type[Any], Any, list[str]]


def _stack(pattern: str, layers: int = LAYERS) -> list[str]:
    return [pattern.replace("*", str(layer)) for layer in range(layers)]


def _llama_like(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        **more,
    }


def gpt2(**more: Any) -> Small:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    return GPT2LMHeadModel, config, _stack("transformer.h.*")


def llama(**more: Any) -> Small:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig(**_llama_like(**more)), _stack("model.layers.*")


def qwen3(**more: Any) -> Small:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM, Qwen3Config(**_llama_like(head_dim=8, **more)), _stack("model.layers.*")


def recurrent_gemma(**more: Any) -> Small:
    """Keeps a part of its state between tokens in its modules."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    sizes = {"lru_width": HIDDEN, "head_dim": 8, "attention_window_size": 8}
    config = RecurrentGemmaConfig(**{**_llama_like(), "num_key_value_heads": 1, **sizes, **more})
    return RecurrentGemmaForCausalLM, config, _stack("model.layers.*")


def _bert_like(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        **more,
    }


def bert(**more: Any) -> Small:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM, BertConfig(**_bert_like(**more)), _stack("bert.encoder.layer.*")


def roberta(**more: Any) -> Small:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM, RobertaConfig(**_bert_like(pad_token_id=1, **more)), _stack("roberta.encoder.layer.*")


def albert(**more: Any) -> Small:
    """One block, called four times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(**_bert_like(embedding_size=16, **more))
    return AlbertForMaskedLM, config, ["albert.encoder.albert_layer_groups.0.albert_layers.0"]


def t5(**more: Any) -> Small:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
        **more,
    )
    return T5ForConditionalGeneration, config, [*_stack("encoder.block.*"), *_stack("decoder.block.*")]


def bart(**more: Any) -> Small:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _BART_SIZES.items()}
    config = BartConfig(vocab_size=VOCAB, d_model=HIDDEN, max_position_embeddings=POSITIONS, **sizes, **more)
    return BartForConditionalGeneration, config, [*_stack("model.encoder.layers.*"), *_stack("model.decoder.layers.*")]


_BART_SIZES = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": INNER}


def bloom(**more: Any) -> Small:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, **more)
    return BloomForCausalLM, config, _stack("transformer.h.*")


def gemma3(**more: Any) -> Small:
    """Sliding and full attention: two rotary embeddings, two masks."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**_llama_like(head_dim=8, sliding_window=4, layer_types=kinds, **more))
    return Gemma3ForCausalLM, config, _stack("model.layers.*")


def gemma4(**more: Any) -> Small:
    """The last two blocks reuse keys and values that earlier blocks put into a dict."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    small = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "global_head_dim": 8,
    }
    config = Gemma4TextConfig(**_llama_like(head_dim=8, sliding_window=4, layer_types=kinds, **small, **more))
    return Gemma4ForCausalLM, config, _stack("model.layers.*")


def mixtral(**more: Any) -> Small:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM, MixtralConfig(**_llama_like(num_local_experts=4, **more)), _stack("model.layers.*")


def mamba(**more: Any) -> Small:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=8, **more)
    return MambaForCausalLM, config, _stack("backbone.layers.*")


SMALL: dict[str, Callable[..., Small]] = {
    build.__name__: build
    for build in (gpt2, llama, qwen3, bert, roberta, albert, t5, bart, bloom, gemma3, gemma4, mixtral, mamba)
}
