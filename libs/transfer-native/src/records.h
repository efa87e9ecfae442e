/* Encrypted records, see `halfmoon_transfer.backends.tcp.record_layer`. */
#ifndef HALFMOON_RECORDS_H
#define HALFMOON_RECORDS_H

#include "wire.h"

extern PyTypeObject Records_Type;

/* Once, when the module is imported: looks for libcrypto. */
void records_init(void);
/* Converts an argument, `Records` or None, for PyArg_ParseTuple. */
int records_or_none(PyObject *given, void *records);
/* Why there is no encryption; "" where there is. */
const char *records_missing(void);

/* Seal up to one record of these into `*sealed`, and step over its bytes in the vector. */
End records_seal(Records *records, struct iovec *buffers, size_t n_buffers, size_t *first, struct iovec *sealed);
/* Hand out opened bytes, and open a record for that if a whole one is here. UNUSUAL: none is. */
End records_take(Records *records, struct iovec *buffers, size_t n_buffers, size_t *n_taken);
/* The room for bytes as they arrive; then say how many came. */
struct iovec records_room(Records *records);
void records_arrived(Records *records, size_t n_bytes);
/* Whether a part of a record is here. */
bool records_in_the_middle(const Records *records);
/* Records opened so far. */
uint64_t records_n_opened(const Records *records);

#endif
