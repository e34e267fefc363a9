"""Map the five top-level folders onto the package `drafthead`.

The folders carry no `__init__.py` of their own: with one, `import kernels` or `import data`
from the checkout's root would find ours instead of a third-party package of that name.
"""

from setuptools import find_packages, setup

FOLDERS = ("data", "kernels", "eval", "pipeline")


def subpackages(folder: str) -> list[str]:
    return [f"drafthead.{folder}"] + [f"drafthead.{folder}.{name}" for name in find_packages(folder)]


setup(
    packages=[name for folder in FOLDERS for name in subpackages(folder)] + ["drafthead.recipes"],
    package_dir={f"drafthead.{folder}": folder for folder in (*FOLDERS, "recipes")},
    package_data={
        "drafthead.data": ["prompts/**/*.jsonl"],
        "drafthead.recipes": ["**/*.yaml"],
        "drafthead.pipeline.report": ["template/*"],
    },
    include_package_data=False,
)
