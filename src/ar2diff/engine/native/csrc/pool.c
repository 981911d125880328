/* Threads that run one function together, phase by phase.
 *
 * A phase is over when all its pieces are done, not when all threads have arrived: on a busy machine a thread that
 * the system has put aside holds nobody up unless it holds a piece. A thread may therefore wake in a round that is
 * over. Counters carry the round in their upper half, so such a thread gets no piece and leaves; until it has a piece
 * it must read nothing but the pool's own memory and what `argument` points at, which both outlive the round.
 * Between rounds threads spin for a moment, then sleep.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "native.h"
#include "pool.h"

#define SPINS_BEFORE_YIELD 2000
#define SPINS_BEFORE_SLEEP 2000
#define COUNT_BITS 24
#define COUNT_MASK ((1LL << COUNT_BITS) - 1)

struct Pool {
    int num_threads, num_started;
    pid_t owner;
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*_Atomic work)(void *, Turn *);
    void *argument;
    _Atomic int64_t round; /* grows with every run; -1 ends the threads */
    int64_t num_phases; /* of the last round */
    Phase phases[MAX_PHASES];
};

typedef struct {
    Pool *pool;
    int thread;
} Seat;

static void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static int64_t wait_for_round(Pool *pool, int64_t seen)
{
    for (int spin = 0; spin < SPINS_BEFORE_SLEEP; spin++) {
        int64_t now = atomic_load_explicit(&pool->round, memory_order_acquire);
        if (now != seen) return now;
        pause_cpu();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->round) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return atomic_load(&pool->round);
}

static void *serve(void *argument)
{
    Seat seat = *(Seat *)argument;
    free(argument);
    Turn turn = {seat.pool, 0, seat.thread, 0};
    while ((turn.round = wait_for_round(seat.pool, turn.round)) >= 0)
        atomic_load(&seat.pool->work)(seat.pool->argument, &turn);
    return NULL;
}

static int start(Pool *pool)
{
    pool->owner = getpid();
    pool->num_started = 0;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    atomic_store(&pool->round, 0);
    for (int thread = 1; thread < pool->num_threads; thread++) {
        Seat *seat = malloc(sizeof *seat);
        if (!seat) return 0;
        *seat = (Seat){pool, thread};
        if (pthread_create(&pool->threads[thread], NULL, serve, seat)) {
            free(seat);
            return 0;
        }
        pool->num_started = thread;
    }
    return 1;
}

Pool *pool_open(int num_threads)
{
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->num_threads = num_threads;
    pool->threads = calloc(num_threads, sizeof(pthread_t));
    if (pool->threads && start(pool)) return pool;
    pool_close(pool);
    return NULL;
}

static void announce(Pool *pool, int64_t round)
{
    pthread_mutex_lock(&pool->lock);
    atomic_store_explicit(&pool->round, round, memory_order_release);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

void pool_close(Pool *pool)
{
    if (!pool) return;
    if (pool->num_started > 0 && pool->owner == getpid()) {
        announce(pool, -1);
        for (int thread = 1; thread <= pool->num_started; thread++) pthread_join(pool->threads[thread], NULL);
    }
    free(pool->threads);
    free(pool);
}

/* From here on no thread gets a piece of an earlier round: the caller may change what `argument` points at. */
void pool_begin(Pool *pool, int64_t num_phases)
{
    if (pool->owner != getpid()) start(pool); /* a forked child has the memory but not the threads */
    int64_t round = atomic_load(&pool->round) + 1;
    int64_t stale = pool->num_phases > num_phases ? pool->num_phases : num_phases;
    for (int64_t phase = 0; phase < stale; phase++) {
        atomic_store(&pool->phases[phase].next, round << COUNT_BITS);
        atomic_store(&pool->phases[phase].done, round << COUNT_BITS);
    }
    pool->num_phases = num_phases;
}

void pool_run(Pool *pool, void (*work)(void *, Turn *), void *argument)
{
    Turn turn = {pool, atomic_load(&pool->round) + 1, 0, 0};
    atomic_store(&pool->work, work);
    pool->argument = argument;
    announce(pool, turn.round);
    work(argument, &turn);
}

int64_t pool_take(Turn *turn, int64_t phase, int64_t count)
{
    _Atomic int64_t *next = &turn->pool->phases[phase].next;
    int64_t seen = atomic_load_explicit(next, memory_order_acquire);
    while (seen >> COUNT_BITS == turn->round && (seen & COUNT_MASK) < count)
        if (atomic_compare_exchange_weak(next, &seen, seen + 1)) {
            turn->taken++;
            return seen & COUNT_MASK;
        }
    return -1;
}

void pool_finish(Turn *turn, int64_t phase, int64_t count)
{
    _Atomic int64_t *done = &turn->pool->phases[phase].done;
    if (turn->taken) atomic_fetch_add(done, turn->taken);
    turn->taken = 0;
    for (int spin = 0;; spin++) {
        int64_t seen = atomic_load_explicit(done, memory_order_acquire);
        if (seen >> COUNT_BITS != turn->round || (seen & COUNT_MASK) >= count) return;
        if (spin < SPINS_BEFORE_YIELD) pause_cpu();
        else sched_yield();
    }
}

int pool_size(const Pool *pool) { return pool->num_threads; }
