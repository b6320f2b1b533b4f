"""Models that were parallelized in one process go through pickle as plain ones do."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import oslo_engine as oslo
import small_models


@pytest.mark.parametrize("fuse", [None, True])
def test_a_model_of_one_process_comes_back_from_pickle(fuse: Any) -> None:
    cls, config, _ = small_models.llama(attn_implementation="eager")
    plain = cls(config).eval()
    ids = torch.arange(3, 13).view(2, 5)
    wanted = plain(input_ids=ids).logits
    model = oslo.parallelize(plain, fuse=fuse)
    came = pickle.loads(pickle.dumps(model))
    assert came.fusion_report is None
    torch.testing.assert_close(came(input_ids=ids).logits, wanted)
    assert torch.equal(came.generate(ids, max_new_tokens=2, do_sample=False)[:, :5], ids)
    assert came.train_step({"input_ids": ids, "labels": ids}).isfinite()
