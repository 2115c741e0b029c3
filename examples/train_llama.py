"""Train an unmodified Llama of transformers through codetta, on this file's own bytes: a plain training loop.

python examples/train_llama.py          needs no GPU
python examples/train_llama.py cuda     on one: a wider model in bfloat16, through kernels
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, SEQUENCES, LENGTH = 30, 4, 64


def build(width: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,  # in training, caches would only be returned and kept alive
    )
    return LlamaForCausalLM(config).train()


def main(device: str = "cpu") -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    model = build() if device == "cpu" else build(1024).to(device, torch.bfloat16)
    compiled = torch.compile(model, backend="codetta")  # the only line that is not plain PyTorch
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if device == "cpu" else 3e-4)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH, (SEQUENCES,))
        ids = torch.stack([text[s : s + LENGTH] for s in starts])
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
