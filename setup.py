"""The packages: oslo_engine/ as it is, kernels/ and policies/ inside it. Everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["oslo_engine", "oslo_engine.*"]),
        *(f"oslo_engine.{name}" for name in find_packages(include=["kernels", "kernels.*", "policies", "policies.*"])),
    ],
    package_dir={"oslo_engine.kernels": "kernels", "oslo_engine.policies": "policies"},
)
