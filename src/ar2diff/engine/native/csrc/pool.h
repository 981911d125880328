/* Threads that run one function together; see pool.c. */
#ifndef AR2_POOL_H
#define AR2_POOL_H

#include <stdatomic.h>
#include <stdint.h>

#define MAX_PHASES 4096

typedef struct Pool Pool;

/* Apart, so that threads that take pieces do not disturb those that wait. */
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    _Alignas(64) _Atomic int64_t done;
} Phase;

/* One thread's part in one round. */
typedef struct {
    Pool *pool;
    int64_t round;
    int thread;
    int64_t taken;
} Turn;

Pool *pool_open(int num_threads);
void pool_close(Pool *pool);
void pool_begin(Pool *pool, int64_t num_phases);
void pool_run(Pool *pool, void (*work)(void *, Turn *), void *argument);
int64_t pool_take(Turn *turn, int64_t phase, int64_t count); /* a piece of a phase, or -1 */
void pool_finish(Turn *turn, int64_t phase, int64_t count);  /* waits until all its pieces are done */
int pool_size(const Pool *pool);

#endif
