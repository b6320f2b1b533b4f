from __future__ import annotations
import pytest, torch
from toy_pipeline import *
from oslo_engine.pipeline.orders import SCHEDULES

def trains_like_the_unsplit_model(schedule, interface):
    pipe = toy_pipeline(schedule)
    whole = toy(pipe.program.num_stages)
    for rows, length in ((11, 5), (16, 3), (11,5)):
        batch = batch_of(rows, length, rows)
        loss = getattr(pipe, interface)(batch)
        expected_loss, expected = reference(whole, batch)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=0)
        assert_equal_gradients(pipe.gradients(), expected)

@pytest.mark.parametrize("pp", [2,4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("interface", ["train_step","loop_step"])
def test_a(rank_pool, pp, schedule, interface):
    rank_pool(pp).run(trains_like_the_unsplit_model, schedule, interface)
