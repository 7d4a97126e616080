"""Data files, or a data source, to problems in order: read, render, tokenize, filter, shuffle."""

from rlmath.config.data_sources import DATA_SOURCES
from rlmath.data.load import Example, load_examples, load_problems
from rlmath.data.prompts import load_tokenizer
from rlmath.data.stream import ProblemStream, Stream
