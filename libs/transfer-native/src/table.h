/* The owner's regions, and its loop. */
#ifndef HALFMOON_TABLE_H
#define HALFMOON_TABLE_H

#include "wire.h"

extern PyTypeObject Table_Type;

#endif
