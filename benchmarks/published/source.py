"""The source of a row: the document or repository that its `source` column names."""

import re

REPOSITORY = re.compile(r"^(?:https?://)?(?:github\.com/)?([a-z0-9][\w.-]*/[a-z0-9][\w.-]*)(?=[\s@,;:/(]|$)")
PAPER = re.compile(r"arxiv[ :/]*(?:abs/)?(\d{4}\.\d{4,5})")
TITLE = re.compile(r"[^(;,:@|]+")


def source_key(text: str, file: str) -> str:
    """Returns the key of a row's source: a repository that the text starts with, else its first paper, else its title.

    Rows of one repository or of one paper share software and often authors, whatever page or table they are on.

    Args:
      text: the cell of the `source` column.
      file: what stands for the source where the cell is empty.

    Example:
      >>> source_key("VIA-Research/vTrain data/multi.csv (arXiv 2312.12391)", "a")
      'via-research/vtrain'
      >>> source_key("Narayanan et al. 2021 (arXiv 2104.04473) Table 1; read from NVIDIA/Megatron-LM", "a")
      'arxiv 2104.04473'
    """
    text = text.strip().lower()
    if repository := REPOSITORY.match(text):
        return repository[1].removesuffix(".git")
    if paper := PAPER.search(text):
        return f"arxiv {paper[1]}"
    title = TITLE.match(text)
    return " ".join(title[0].split()) if title and title[0].strip() else file
