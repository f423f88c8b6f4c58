"""Request -> [Seq]: texts, pairs, templates and parts as ids. `tokenizer.Tokenizer` is the way in."""
