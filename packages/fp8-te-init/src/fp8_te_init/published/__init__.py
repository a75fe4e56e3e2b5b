"""Published FP8 checkpoints: load, fine-tune and save without a high-precision copy.

Example:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    convert_published(model, folder)
    model = get_peft_model(model, LoraConfig(...))
    fully_shard(model)
    load_published(model, folder)
"""

from fp8_te_init.published.digests import Receiver
from fp8_te_init.published.engine import Sent, rows_of, stream_tensors, stream_weights
from fp8_te_init.published.load import Loaded, convert_published, load_published, save_published
from fp8_te_init.published.masters import PublishedOptimizer
from fp8_te_init.published.merge import LayerMerge, MergeReport, merge_adapter, merge_report
from fp8_te_init.published.weight import PublishedWeight

__all__ = [
    "LayerMerge",
    "Loaded",
    "MergeReport",
    "PublishedOptimizer",
    "PublishedWeight",
    "Receiver",
    "Sent",
    "convert_published",
    "load_published",
    "merge_adapter",
    "merge_report",
    "rows_of",
    "save_published",
    "stream_tensors",
    "stream_weights",
]
