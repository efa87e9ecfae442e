"""Write what checks found: lines, JSON and JUnit."""
