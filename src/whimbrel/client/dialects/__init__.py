"""APIs that the clients speak. The functions of a module turn the arguments of a verb into a Task."""
