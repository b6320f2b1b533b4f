"""One YAML file for each family of architectures: what of a model may be split, and how.

Installed as ``oslo_engine.policies``.
"""
