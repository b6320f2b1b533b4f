"""From raw text to training batches.

Text becomes two files in Megatron's format (``preprocess``), which are read in one of three ways (``indexed``), cut into
windows for training (``causal``), blended, sampled and repeated. Modules that only prepare data need neither torch nor
transformers, so that worker processes stay small.
"""
