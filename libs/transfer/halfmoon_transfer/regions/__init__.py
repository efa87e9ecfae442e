"""Hold the registered memory of this process: keys, accesses, and what lies behind regions.

The modules, from the engine downwards:

    region_table     what an engine registers, and what peers may map or view
    region_leases    accesses that are going on; a region is freed after the last one
    backed_regions   bytes of regions that are files or device memory
    region_index     the entries by key, under one lock
    access           statuses on the wire, and the one check of bounds and of the right to write
"""
