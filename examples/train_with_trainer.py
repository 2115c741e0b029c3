"""Train an unmodified Llama with transformers' Trainer through codetta, on this file's own bytes, and save it.

Needs accelerate (pip install accelerate).

python examples/train_with_trainer.py          needs no GPU
python examples/train_with_trainer.py cuda     on one: a wider model under bfloat16 autocast, through kernels

accelerate, which compiles the model for the Trainer, takes only the names of a fixed list, so codetta's is registered
with it. What is saved has the usual names, and needs no codetta to be read.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import codetta

LENGTH = 64


def build(width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, Tensor]]:
    """Every window of the text, as a language model's training takes it."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [{"input_ids": row, "labels": row} for row in text.unfold(0, LENGTH, LENGTH // 8)]


def main(device: str = "cpu") -> None:
    torch.manual_seed(0)
    model = build(64 if device == "cpu" else 1024)
    codetta.register_with_accelerate()  # this line and the backend's name are all that is not plain transformers
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=30,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=2e-3 if device == "cpu" else 3e-4,
            logging_steps=10,
            save_steps=30,
            use_cpu=device == "cpu",
            bf16=device != "cpu",
            torch_compile_backend="codetta",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows())
        trainer.train()
        read = LlamaForCausalLM.from_pretrained(Path(folder) / "checkpoint-30")
    for entry in trainer.state.log_history[:-1]:
        print(f"step {entry['step']}: loss {entry['loss']:.3f}")
    saved = dict(read.named_parameters())
    print("the checkpoint is the model:", all(torch.equal(p.cpu(), saved[n]) for n, p in model.named_parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
