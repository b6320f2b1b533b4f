"""Planning of very large models: what is said, against what is known of them; how long it takes, in how much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, OPTConfig, PreTrainedConfig, T5Config

GB = 10**9
CPU_SECONDS, PEAK_BYTES = 10, 2 << 30
SLOWNESS = 3  # a machine that runs other things takes up to this many times the CPU seconds of an idle one
T5_11B = T5Config(
    d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128, vocab_size=32128,
    architectures=["T5ForConditionalGeneration"],
)  # fmt: skip
OPT_175B = OPTConfig(
    hidden_size=12288, num_hidden_layers=96, ffn_dim=49152, num_attention_heads=96, word_embed_proj_dim=12288,
    architectures=["OPTForCausalLM"],
)  # fmt: skip
LLAMA_405B = LlamaConfig(
    vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
    num_key_value_heads=8, max_position_embeddings=131072, architectures=["LlamaForCausalLM"],
)  # fmt: skip

# Runs the command, and says what it took. Its peak is asked of the kernel for what was run: ru_maxrss also knows that of the
# process it was forked from.
MEASURED = """
import resource, sys
from pathlib import Path
from oslo_engine.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print("USED", code, used.ru_utime + used.ru_stime, int(peak) * 1024)
"""


def planned(folder: Path, config: PreTrainedConfig, *options: str) -> tuple[dict[str, Any], int, float, int]:
    """(the JSON, exit code, CPU seconds, peak bytes)."""
    config.save_pretrained(folder)
    command = [sys.executable, "-c", MEASURED, "plan", str(folder), *options, "--json", str(folder / "plan.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=environment)
    code, seconds, peak = ran.stdout.rpartition("USED")[2].split()
    return json.loads((folder / "plan.json").read_text()), int(code), float(seconds), int(peak)


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter", "fits"),
    [
        (["--dtype", "float32"], 16, False),  # weight, gradient and two of Adam's, 4 bytes each
        (["--optimizer", "adamw-master"], 16, False),  # 2 + 2, and three numbers of 4 bytes
        (["--optimizer", "adamw"], 8, True),  # all in bfloat16
    ],
    ids=["float32", "bfloat16 with float32 masters", "bfloat16 alone"],
)
def test_t5_11b_on_four_gpus_of_40_gb(tmp_path: Path, options: list[str], bytes_a_parameter: int, fits: bool) -> None:
    shape = ["--gpus", "4", "--memory", "40GB", "--target-seq", "128", "--checkpointing"]
    found, code, seconds, peak = planned(tmp_path, T5_11B, *shape, *options)
    assert seconds < SLOWNESS * CPU_SECONDS
    assert peak < PEAK_BYTES
    assert found["parameters"] == 11_307_321_344
    assert (code, bool(found["fitting"])) == (0 if fits else 1, fits)
    state = bytes_a_parameter * found["parameters"]
    assert (state > 4 * 40 * GB) == (not fits), "the states alone decide"
    least = found["least_gpus"]
    assert state <= least["gpus"] * 40 * GB
    assert state > (least["gpus"] - 1) * 40 * GB - least["gpus"] * 4 * GB, "one GPU less would not hold states and activations"
    for layout in found["fitting"] + found["others"]:
        size, divided = layout["layout"], layout["ranks"][0]
        ranks = size["tp"] * size["pp"] * (size["dp"] if size["zero"] == 3 else 1)
        if size["zero"] in (0, 3) and size["pp"] == 1:
            total = sum(divided[kind] for kind in ("weights", "gradients", "optimizer"))
            assert state / ranks <= total <= 1.02 * state / ranks


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1024, 16384])
@pytest.mark.parametrize(("config", "length"), [(OPT_175B, 2048), (LLAMA_405B, 8192)], ids=["opt-175b", "llama-405b"])
def test_thousands_of_gpus_take_seconds_and_little_memory(
    tmp_path: Path, config: PreTrainedConfig, length: int, gpus: int
) -> None:
    options = ["--gpus", str(gpus), "--memory", "80GB", "--batch", str(2 * gpus), "--seq", str(length)]
    found, code, seconds, peak = planned(tmp_path, config, *options, "--optimizer", "adamw-master")
    print(f"{seconds:.1f} CPU seconds, {peak / GB:.2f} GB")
    assert code == 0
    assert seconds < SLOWNESS * CPU_SECONDS
    assert peak < PEAK_BYTES
    state = 16 * found["parameters"]
    least = found["least_gpus"]["gpus"]
    assert 1.0 <= least * 80 * GB / state < 1.3, "as many GPUs as hold 16 bytes a parameter, and some room"
    best = found["fitting"][0]
    assert best["layout"]["tp"] <= 8, "within a node"
    tokens = 2 * gpus * length
    computing = 6 * found["parameters"] * tokens / (gpus * 300e12)  # 6 operations a parameter and token, at --tflops
    assert computing <= best["seconds"] <= 2 * computing
