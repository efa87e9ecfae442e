"""Start, kill and find the tested process, with the metadata server that it joins."""
