"""The config: GLM-5.2, GLM-5.1 and DeepSeek-V3.2 files, contradictions, and the numbers to the digit."""
import dataclasses
import json

import pytest
from hypothesis import given, strategies as st

from glm52.config import ConfigError, ModelConfig, checkpoint_tensors

GLM_5_2 = dict(
    architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa", vocab_size=154880, hidden_size=6144, num_hidden_layers=78,
    num_nextn_predict_layers=1, intermediate_size=12288, moe_intermediate_size=2048, num_attention_heads=64, num_key_value_heads=64,
    q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, qk_head_dim=256, v_head_dim=256, head_dim=192,
    rope_parameters={"rope_theta": 8000000, "rope_type": "default"}, rope_interleave=True, indexer_rope_interleave=True,
    max_position_embeddings=1048576, index_topk=2048, index_n_heads=32, index_head_dim=128, index_topk_freq=4, index_skip_topk_offset=3,
    index_topk_pattern=None, index_share_for_mtp_iteration=True, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_method="noaux_tc", rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False,
    eos_token_id=[154820, 154827, 154829], pad_token_id=154820, initializer_range=0.02, attention_bias=False, dtype="bfloat16")
GLM_5_1 = {key: value for key, value in GLM_5_2.items() if not key.startswith(("index_topk_", "index_skip", "index_share", "head_dim"))} | dict(
    max_position_embeddings=202752, rope_parameters={"rope_theta": 1000000, "rope_type": "default"})
DEEPSEEK = dict(
    architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", vocab_size=129280, hidden_size=7168, num_hidden_layers=61,
    num_nextn_predict_layers=1, intermediate_size=18432, moe_intermediate_size=2048, num_attention_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_theta=10000, max_position_embeddings=163840,
    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                  "mscale": 1.0, "mscale_all_dim": 1.0},
    index_topk=2048, index_n_heads=64, index_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_method="noaux_tc", rms_norm_eps=1e-6, eos_token_id=1, torch_dtype="bfloat16")
FULL = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)
WORDS = ["full" if i in FULL else "shared" for i in range(78)]
NO_RULE = {"index_topk_freq": None, "index_skip_topk_offset": None}


def test_glm_5_2_to_the_digit():
    d = ModelConfig.from_dict(GLM_5_2).describe()
    assert d.total_parameters == 753_329_940_480
    assert (d.main_parameters, d.mtp_parameters) == (743_377_019_904, 9_952_920_576)
    assert (d.tensors, d.fp8_names, d.bytes_fp8) == (59_585, 118_629, 755_617_140_416)
    assert round(d.bytes_bf16 / 1e9, 2) == 1506.66
    assert round(d.active_parameters / 1e9, 2) == 40.30
    assert d.parameters["attention"] == 78 * 165_022_208 and d.parameters["indexers"] == 21 * 9_371_904
    for row in ("753,329,940,480", "59,585", "118,629", "92,628", "93,912", "53,940", "54,728", "21 full, 57 shared"):
        assert row in repr(d)


def test_glm_5_1_and_deepseek_describe_themselves():
    glm = ModelConfig.from_dict(GLM_5_1)
    assert glm.describe().total_parameters == 753_864_139_008 and len(glm.full_layers) == 78
    deepseek = ModelConfig.from_dict(DEEPSEEK).describe()
    assert round(deepseek.total_parameters / 1e9) in (685, 686)


def test_cache_bytes_to_the_digit():
    c = ModelConfig.from_dict(GLM_5_2)
    assert [c.cache_bytes_per_token(kind, "fp8", mtp) for kind in ("bf16", "fp8") for mtp in (False, True)] == [92_628, 93_912, 53_940, 54_728]
    with pytest.raises(ConfigError, match="int4"): c.cache_bytes_per_token("int4")


def test_schedule_from_list_pattern_and_rule():
    sources = [NO_RULE | {"indexer_types": WORDS}, NO_RULE | {"index_topk_pattern": "".join(w[0].upper() for w in WORDS)}, {},
               {"indexer_types": WORDS}]
    configs = [ModelConfig.from_dict(GLM_5_2 | source) for source in sources]
    assert all(c == configs[0] and c.full_layers == FULL for c in configs)
    assert [configs[0].index_source(i) for i in (0, 3, 5, 6, 9, 77, 78)] == [0, 2, 2, 6, 6, 74, 78]
    assert ModelConfig.from_dict(GLM_5_2 | NO_RULE).full_layers == tuple(range(78))


@pytest.mark.parametrize("change, words", {
    "list against rule": ({"indexer_types": ["full"] * 78}, "indexer_types and index_topk_freq.*layer 3"),
    "pattern against rule": ({"index_topk_pattern": "F" * 78}, "index_topk_pattern and index_topk_freq.*layer 3"),
    "short list": ({"indexer_types": WORDS[:77]}, "77 layers, num_hidden_layers is 78"),
    "unknown word": (NO_RULE | {"indexer_types": ["half"] * 78}, "half"),
    "unknown letter": (NO_RULE | {"index_topk_pattern": "F" + "X" * 77}, "X"),
    "first shared": (NO_RULE | {"indexer_types": ["shared"] + WORDS[1:]}, "layer 0 is shared"),
    "two thetas": ({"rope_theta": 1e6}, "rope_theta"),
    "no theta": ({"rope_parameters": None}, "no rope_theta"),
    "rope type": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
    "yarn without factor": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "factor"),
    "qk width": ({"qk_head_dim": 192}, "256"),
    "dense rule": ({"mlp_layer_types": ["dense"] + ["sparse"] * 77}, "first_k_dense_replace"),
    "model": ({"model_type": "llama"}, "llama.*glm_moe_dsa"),
    "architecture": ({"architectures": ["GlmForCausalLM"]}, "GlmForCausalLM"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "experts": ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
    "negative": ({"vocab_size": -1}, "vocab_size"),
    "odd rope": ({"qk_rope_head_dim": 63, "qk_head_dim": 255}, "even"),
}.values(), ids=lambda value: value if isinstance(value, str) else "")
def test_contradictions_are_errors(change, words):
    with pytest.raises(ConfigError, match=words): ModelConfig.from_dict(GLM_5_2 | change)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "index_topk", "routed_scaling_factor", "num_hidden_layers"])
def test_missing_number_is_named(key):
    with pytest.raises(ConfigError, match=key): ModelConfig.from_dict({k: v for k, v in GLM_5_2.items() if k != key})


def test_head_dim_is_never_used():
    configs = [ModelConfig.from_dict(GLM_5_2 | {"head_dim": width}) for width in (192, 64, 256, None)]
    assert all(c == configs[0] for c in configs) and configs[0].qk_rope_head_dim == 64


def test_theta_in_either_place():
    old = ModelConfig.from_dict({k: v for k, v in GLM_5_2.items() if k != "rope_parameters"} | {"rope_theta": 8000000})
    assert old == ModelConfig.from_dict(GLM_5_2) and old.rope_theta == 8e6 and old.rope_scaling is None


def test_deepseek_defaults():
    c = ModelConfig.from_dict(DEEPSEEK)
    nested = {k: v for k, v in DEEPSEEK.items() if k not in ("rope_theta", "rope_scaling")}
    nested["rope_parameters"] = {**DEEPSEEK["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    del nested["rope_parameters"]["type"]
    assert ModelConfig.from_dict(nested) == c
    assert (c.rope_interleave, c.indexer_rope_interleave, c.rope_scaling["factor"], c.eos_token_id) == (True, False, 40, (1,))
    assert abs(c.softmax_scale / (192 ** -0.5 * 1.3688879454113936 ** 2) - 1) < 1e-12
    assert ModelConfig.from_dict(GLM_5_1).indexer_rope_interleave


def test_eps_of_the_low_rank_norms():
    c = ModelConfig.from_dict(GLM_5_2)
    assert (c.lora_norm_eps, c.index_norm_eps) == (1e-5, 1e-6)
    assert ModelConfig.from_dict(GLM_5_2 | {"lora_norm_eps": 1e-6}).lora_norm_eps == 1e-6


@pytest.mark.parametrize("entries", [GLM_5_2, GLM_5_1, DEEPSEEK, GLM_5_2 | {"first_k_dense_replace": None, "mlp_layer_types": ["sparse", "dense"] * 39}],
                         ids=["5.2", "5.1", "deepseek", "alternating"])
def test_round_trip_through_a_file(entries, tmp_path):
    config = ModelConfig.from_dict(entries)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_dir(tmp_path) == config


def test_transformers_reads_what_we_write():
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.from_dict(GLM_5_2)
    theirs = transformers.GlmMoeDsaConfig(**config.to_dict())
    assert tuple(theirs.indexer_types) == config.indexer_types and tuple(theirs.mlp_layer_types) == config.mlp_layer_types
    assert theirs.rope_parameters["rope_theta"] == 8e6 and theirs.head_dim == 64


def test_bad_directories_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such model directory"): ModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no config.json"): ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(ConfigError, match="not JSON"): ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"): ModelConfig.from_dir(tmp_path)


@given(st.integers(1, 8), st.integers(0, 6), st.integers(1, 40))
def test_any_schedule_starts_full_or_is_refused(freq, offset, layers):
    entries = GLM_5_2 | {"num_hidden_layers": layers, "index_topk_freq": freq, "index_skip_topk_offset": offset}
    full = [i for i in range(layers) if max(i - offset + 1, 0) % freq == 0]
    if 0 not in full:
        with pytest.raises(ConfigError, match="layer 0"): ModelConfig.from_dict(entries)
        return
    config = ModelConfig.from_dict(entries)
    assert list(config.full_layers) == full
    assert all(config.index_source(i) == max(f for f in full if f <= i) for i in range(layers))


def test_config_cannot_be_changed_and_tensors_follow_the_schedule():
    config = ModelConfig.from_dict(GLM_5_2)
    with pytest.raises(dataclasses.FrozenInstanceError): config.index_topk = 1
    names = checkpoint_tensors(config)
    owners = {int(name.split(".")[2]) for name in names if ".indexer." in name}
    assert owners == {*FULL, 78}
    assert names["model.layers.78.eh_proj.weight"].shape == (6144, 12288) and not names["model.layers.78.eh_proj.weight"].fp8
