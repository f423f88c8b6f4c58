"""The pages for browsers: the playground at / and the reference at /docs. Their files lie in this folder and need no build."""
