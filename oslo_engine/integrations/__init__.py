"""What other libraries need to train a split model: DeepSpeed, Transformers' Trainer, PEFT. Each is imported when used."""
