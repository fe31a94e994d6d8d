"""Will a node be asked for again, and how soon: learnt online, by class and age."""
