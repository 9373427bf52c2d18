"""The default model as transformers reads its GGUF file, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
)


def load_reference(gguf: Path) -> transformers.LlamaForCausalLM:
    """Return the model; its from_pretrained would need one more package to do the same."""
    config = load_gguf_checkpoint(str(gguf))["config"]
    with no_init_weights():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    keys = model.load_state_dict(tensors, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    model.generation_config.eos_token_id = None  # generate goes on after it, as the tests do
    return model.eval()


@torch.no_grad()
def all_logprobs(reference: transformers.LlamaForCausalLM, token_ids: list[int]) -> np.ndarray:
    """Return fp32 [len(token_ids), vocab_size]: what each token says of the next one."""
    return reference(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()


def encode_prompts(directory: Path) -> list[list[int]]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    return [tokenizer.encode(text) for text in PROMPTS]
