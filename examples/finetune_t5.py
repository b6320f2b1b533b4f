"""Teach T5 to say what a function is for, with Seq2SeqTrainer: only the imports and one call differ from one GPU.

    torchrun --nproc-per-node=4 examples/finetune_t5.py --tp 2 --pp 2

Text: functions of the Python that runs this, and the first lines of their documentation. ``--model FOLDER`` is yours to tune.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import torch
from transformers import AutoTokenizer, ByT5Tokenizer, DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration

import oslo_engine as oslo
from oslo_engine import Seq2SeqTrainer, Seq2SeqTrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder; by default a small model that knows nothing")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="t5-output")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else ByT5Tokenizer()
    torch.manual_seed(0)  # the same weights on every rank
    if options.model:
        model = T5ForConditionalGeneration.from_pretrained(options.model)
    else:
        sizes = {"d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "num_layers": 2}
        model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes))
    model = oslo.parallelize(model, tp=options.tp, pp=options.pp, micro_batch_size=4)

    rows = [tokenizer(code, text_target=said, max_length=96, truncation=True) for code, said in functions()]
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            options.output, max_steps=options.steps, per_device_train_batch_size=16, per_device_eval_batch_size=8,
            learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], predict_with_generate=True,
            generation_max_length=24, use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=rows[8:],
        eval_dataset=rows[:8],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )  # fmt: skip
    trainer.train()
    answers = trainer.predict(trainer.eval_dataset).predictions
    if trainer.is_world_process_zero():
        print("answer:", tokenizer.decode([token for token in answers[0] if token > 0], skip_special_tokens=True))
    trainer.save_model()


def functions() -> list[tuple[str, str]]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.FunctionDef)]
    described = [(f"def {node.name}({ast.unparse(node.args)})", ast.get_docstring(node)) for node in nodes]
    return [(code, said.split("\n")[0]) for code, said in described if said]


if __name__ == "__main__":
    main()
