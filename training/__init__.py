"""How ``nano`` is made: texts, tokenizer, tasks, training and export.  The package ``deepinfer`` never imports this one."""
