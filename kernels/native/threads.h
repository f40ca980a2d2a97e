/* Work that several threads do together. */

#ifndef KVFERRY_THREADS_H
#define KVFERRY_THREADS_H

#include <stdint.h>

/* Does a part of some work: its items from `first` up to `end`. */
typedef void (*part)(void *work, int64_t first, int64_t end);

/* Do all items of some work, `step` at a time: this thread, and as many others as there are, `threads` in all at
 * most. Each part has `step` items but for the last, whatever the number of threads. Which thread does a part, and
 * when, is not determined, so that a part must not depend on others. */
void share(part run, void *work, int64_t count, int64_t step, int64_t threads);

#endif
