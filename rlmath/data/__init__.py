"""Data files to problems in order: read, render, tokenize, filter, shuffle."""

from rlmath.data.load import Example, load_examples, load_problems
from rlmath.data.prompts import load_tokenizer
from rlmath.data.report import LoadReport
from rlmath.data.stream import ProblemStream
