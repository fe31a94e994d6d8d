"""Prediction of reuse: whether and how soon a node is asked for again, learnt online by class and age."""
