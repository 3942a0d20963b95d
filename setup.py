"""Packaging of hvd_slim. Horovod is never a hard requirement: pip must not start its long build."""

from pathlib import Path

from setuptools import Extension, find_packages, setup

setup(
    name="hvd_slim",
    version="0.1.0",
    description="Slim-DP for Horovod and PyTorch: train data-parallel models on a fraction of the bytes",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.9",
    packages=find_packages(include=["hvd_slim", "hvd_slim.*"]),
    package_data={"hvd_slim": ["py.typed"]},
    # A library that ctypes loads (hvd_slim/native.py). Without a compiler, hvd_slim does without it.
    ext_modules=[
        Extension(
            "hvd_slim._native",
            ["hvd_slim/native.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off"],
            optional=True,
        )
    ],
    install_requires=["numpy", "torch>=2.1"],
    entry_points={"console_scripts": ["hvd-slim = hvd_slim.cli:main"]},
    extras_require={
        "horovod": ["horovod>=0.28"],
        "mpi": ["mpi4py>=3.1"],
        "cli": ["tqdm", "matplotlib"],
        "examples": ["tqdm", "matplotlib"],
        "tensorboard": ["tensorboard"],
        "docs": ["pdoc"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "psutil",
            "mpi4py",
            "ruff",
            "mypy",
            "tensorboard",
            "pdoc",
        ],
    },
)
