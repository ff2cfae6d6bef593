"""The command line: one module per verb, each imported only when its verb is used."""
