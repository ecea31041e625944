"""transformers' Trainer on a GPT-2 of two layers: it divides losses by the tokens of all ranks.
expects: nothing
ranks: 2
"""
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    """Of different lengths; what fills them up is no target."""

    def __init__(self, n, length=24, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 100, (n, length), generator=generator)
        self.lengths = torch.randint(8, length, (n,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        is_text = torch.arange(self.tokens.shape[1]) < self.lengths[i]
        return {"input_ids": self.tokens[i] * is_text, "attention_mask": is_text.long(),
                "labels": self.tokens[i].where(is_text, -100)}


def main():
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2,
                        bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=8, max_steps=12,
            gradient_accumulation_steps=2, learning_rate=1e-3, warmup_steps=2, eval_steps=6,
            eval_strategy="steps", logging_steps=4, save_strategy="no", report_to="none")
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Sentences(512),
                          eval_dataset=Sentences(40, seed=1))
        trainer.train()


if __name__ == "__main__":
    main()
