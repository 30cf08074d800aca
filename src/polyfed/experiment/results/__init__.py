"""What a run leaves: the files of its folder, its models, and the object that `polyfed.run` returns."""
