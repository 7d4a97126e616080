"""How weights travel from the trainer's ranks to the engines."""
