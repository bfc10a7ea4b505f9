"""A plan in the trainers people use: one thin callback for each, which imports its host when it is imported itself."""
