"""What configs call their sizes, and what each is in a tiny model.

Only words that several architectures share, or that say what they count. Names that hold an architecture's, and what a name
cannot tell, stand in the policies' file ``_small.yaml``.
"""

from __future__ import annotations

# 131 is prime: no number of ranks divides the vocabulary. 16 features a head leave an even number to partial rotary embeddings.
HEADS, HEAD_SIZE, VOCAB, INNER, POSITIONS = 4, 16, 131, 52, 64
WIDE_HEAD_SIZE = 24  # where heads times head size is not the hidden size
SIDE_VOCAB = 67  # a vocabulary beside the text's
LARGE = 16  # a side vocabulary or width below this is small enough

# The first that a config has is the size of its own blocks.
HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim")
HEADS_NAMES = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
    "swa_num_attention_heads",
    "num_self_attention_heads",
    "num_cross_attention_heads",
    "linear_num_heads",
    "num_attention_heads_per_layer",
)
KV_HEADS_NAMES = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "kv_n_heads",
    "swa_num_key_value_heads",
    "num_global_key_value_heads",
)
HEAD_SIZE_NAMES = (
    "head_dim",
    "d_kv",
    "dim_head",
    "d_head",
    "attention_head_size",
    "kv_channels",
    "query_pre_attn_scalar",
    "swa_head_dim",
)
LAYERS_NAMES = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
    "num_blocks",
    "num_self_attends_per_block",
    "num_layers_per_stack",
)
INNER_NAMES = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "dff",
    "dim_ff",
    "d_inner",
    "mlp_dim",
    "ffn_hidden_size",
    "feed_forward_size",
    "hidden_dim",
    "dense_intermediate_size",
    "intermediate_size_mlp",
    "block_ff_dim",
)
POSITION_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "context_length",
    "max_source_positions",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)

# Widths of another part of a composite model, whose blocks are as wide as the others.
WIDTH_NAMES = (
    "hidden_size_global",
    "encoder_hidden_size",
    "decoder_hidden_size",
    "backbone_hidden_size",
    "cross_hidden_size",
    "text_hidden_size",
    "vision_hidden_size",
    "audio_hidden_size",
    "out_hidden_size",
    "output_dim",
    "vision_output_dim",
    "projection_dim",
    "mm_embed_dim",
    "audio_embed_dim",
    "out_dim",
    "projector_input_dim",
    "projector_output_dim",
)
# As wide as the blocks, or narrower, or wider: as before.
OWN_WIDTH_NAMES = (
    "embedding_size",
    "embedding_dim",
    "attention_hidden_size",
    "d_latents",
    "word_embed_proj_dim",
    "input_embedding_size",
    "output_embedding_size",
    "entity_emb_size",
    "lru_width",
    "pronunciation_embed_dim",
    "shape_embed_dim",
    "true_hidden_size",
    "intra_bottleneck_size",
    "d_embed",
)
# Heads and groups of state-space and linear attention: twice the heads, of half the inner width each; grouped as KV heads are.
STATE_HEADS_NAMES = ("linear_num_value_heads",)
STATE_GROUPS_NAMES = ("n_groups",)
LINEAR_KEY_HEADS_NAMES = ("linear_num_key_heads",)

FIXED = {
    "original_max_position_embeddings": POSITIONS // 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 32,
    "zero_expert_num": 2,
    "global_head_dim": 32,
    # latent attention
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "o_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 20,
    "swa_v_head_dim": 20,
    # sparse attention
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 6,
    # states
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
    "linear_head_dim": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    # windows
    "sliding_window": 5,
    "sliding_window_size": 5,
    "attention_window_size": 5,
    "local_attention_window_len": 5,
    "keep_window_size": 5,
    "attn_local_window": 5,
    "swa_window_size": 5,
    "window_size": 5,
    "attention_window": 4,  # some insist on even ones
    "attention_chunk_size": 6,
    "chunk_size": 8,
    # other ranks and widths
    "adapter_rank": 12,
    "laurel_rank": 12,
    "gated_norm_rank": 12,
    "hc_lowrank": 12,
    "hidden_size_per_layer_input": 20,
    "router_hidden_size": 20,
    "num_mel_bins": 16,
    "feature_size": 16,
    "image_size": 16,
    "patch_size": 4,
    "base_channels": 32,
    "num_position_embeddings": 16,
    "downsample_hidden_size": 16,
    "codebook_size": 16,
    "output_channels": 16,
    "num_latents": 16,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}
# Counts that stay where they are smaller.
AT_MOST = {
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "num_mtp_layers": 1,
    "num_nextn_predict_layers": 1,
    "num_hidden_groups": 2,
}

# Lists of sizes that are not about layers: every entry becomes this.
LISTS = {"conv_dim": 32, "attention_window": 4}
