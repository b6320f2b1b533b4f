"""A model on two devices behind Flask, in one ordinary Python process.

    python examples/flask_app.py gpt2                       (Flask: pip install flask)
    curl localhost:5000/generate -H 'Content-Type: application/json' -d '{"text": "Once upon a time"}'

The workers hold the model; this process holds none of it. Flask answers each request in a thread of its own, and calls that
come together run together.
"""

from __future__ import annotations

import argparse
from typing import Any

from flask import Flask, jsonify, request
from transformers import AutoTokenizer

from oslo_engine import AutoModelForCausalLM
from oslo_engine.errors import QueueFullError, WorkerDied


def build_app(model: Any, tokenizer: Any) -> Flask:
    app = Flask(__name__)

    @app.post("/generate")
    def generate() -> Any:
        asked = request.get_json(silent=True)
        if not isinstance(asked, dict) or not isinstance(asked.get("text"), str) or not asked["text"]:
            return jsonify(error='send {"text": "..."}'), 400
        inputs = tokenizer(asked["text"], return_tensors="pt")
        try:
            output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
        except QueueFullError as error:
            return jsonify(error=str(error)), 429
        except WorkerDied as error:  # new workers are being started
            return jsonify(error=str(error)), 503
        return jsonify(text=tokenizer.decode(output[0], skip_special_tokens=True))

    @app.get("/health")
    def health() -> Any:
        told = model.health()
        return jsonify(state=told.state), 200 if told.ok else 503

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="hub name or folder")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--port", type=int, default=5000)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained_with_parallel(options.model, tensor_parallel_size=options.tp, deployment=True)
    with model:
        # Flask's reloader would load the model twice: for changes of the code, restart.
        build_app(model, tokenizer).run(port=options.port, threaded=True, use_reloader=False)


if __name__ == "__main__":
    main()
