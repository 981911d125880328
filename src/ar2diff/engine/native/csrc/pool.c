/* Threads that run one function together, with barriers. They spin for a moment between calls, then sleep. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "native.h"

#define MAX_PHASES 4096
#define SPINS_BEFORE_YIELD 4000
#define SPINS_BEFORE_SLEEP 2000

struct Pool {
    int num_threads;
    pid_t owner;
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*work)(void *, int);
    void *argument;
    _Atomic int64_t round; /* grows with every call; -1 ends the threads */
    _Atomic int sleepers, arrived, generation;
    _Atomic int64_t next[MAX_PHASES];
};

typedef struct {
    Pool *pool;
    int thread;
    int64_t seen;
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
    for (;;) {
        seat.seen = wait_for_round(seat.pool, seat.seen);
        if (seat.seen < 0) return NULL;
        seat.pool->work(seat.pool->argument, seat.thread);
        pool_wait(seat.pool, seat.thread);
    }
}

static int start(Pool *pool)
{
    pool->owner = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    atomic_store(&pool->round, 0);
    atomic_store(&pool->arrived, 0);
    atomic_store(&pool->generation, 0);
    for (int thread = 1; thread < pool->num_threads; thread++) {
        Seat *seat = malloc(sizeof *seat);
        if (!seat) return 0;
        *seat = (Seat){pool, thread, 0};
        if (pthread_create(&pool->threads[thread], NULL, serve, seat)) {
            free(seat);
            pool->num_threads = thread;
            return 0;
        }
    }
    return 1;
}

Pool *pool_open(int num_threads)
{
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->num_threads = num_threads;
    pool->threads = calloc(num_threads, sizeof(pthread_t));
    if (!pool->threads || !start(pool)) {
        pool_close(pool);
        return NULL;
    }
    return pool;
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
    if (pool->threads && pool->owner == getpid()) {
        announce(pool, -1);
        for (int thread = 1; thread < pool->num_threads; thread++) pthread_join(pool->threads[thread], NULL);
    }
    free(pool->threads);
    free(pool);
}

void pool_run(Pool *pool, void (*work)(void *, int), void *argument)
{
    if (pool->owner != getpid()) start(pool); /* a forked child has the memory but not the threads */
    for (int phase = 0; phase < MAX_PHASES; phase++) atomic_store_explicit(&pool->next[phase], 0, memory_order_relaxed);
    pool->work = work;
    pool->argument = argument;
    if (pool->num_threads > 1) announce(pool, atomic_load(&pool->round) + 1);
    work(argument, 0);
    pool_wait(pool, 0);
}

void pool_wait(Pool *pool, int thread)
{
    (void)thread;
    int generation = atomic_load_explicit(&pool->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == pool->num_threads - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->generation, generation + 1, memory_order_release);
        return;
    }
    for (int spin = 0; atomic_load_explicit(&pool->generation, memory_order_acquire) == generation; spin++) {
        if (spin < SPINS_BEFORE_YIELD) pause_cpu();
        else sched_yield();
    }
}

int64_t pool_next(Pool *pool, int64_t phase, int64_t count)
{
    int64_t piece = atomic_fetch_add_explicit(&pool->next[phase], 1, memory_order_relaxed);
    return piece < count ? piece : -1;
}

int pool_size(const Pool *pool) { return pool->num_threads; }
