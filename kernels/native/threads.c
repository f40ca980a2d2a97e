/* A pool of threads for the process, which grows to the largest number that a call asks for.
 *
 *     caller:  publish in a desk ──► do parts until none is left ──► wait for parts that helpers do ──► free the desk
 *     helper:  spin, then sleep ──► look through the desks ──► do parts until none is left ──► spin, ...
 *
 * Whoever does a part claims it first, by counting down what is left; so a caller waits for parts that a helper has
 * begun, and never for a helper that the system has not woken or does not run. Waiting threads spin for a short
 * while, since the parts of a decode step follow one another closely, and then sleep, because other threads of the
 * machine, such as prefill's, have work.
 */

#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum { DESKS = 16, MAX_HELPERS = 255 };

/* How long a thread that waits spins before it sleeps. */
static const int64_t SPIN_NS = 40000;

/* Where one thread waits for others. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    atomic_int is_asleep;
} gate;

#define GATE {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0}

/* A caller's work. state is how many helpers may take part, in its upper half, and how many parts nobody has
 * claimed; the fields behind it are stable while a part is claimed and not done. */
typedef struct {
    atomic_int is_taken;
    _Atomic uint64_t state;
    atomic_llong num_done;
    part run;
    void *work;
    int64_t count, step, parts;
    gate caller;
} desk;

static const uint64_t LEFT = 0xFFFFFFFF;
enum { HELPERS_AT = 32 };

static desk desks[DESKS] = {[0 ... DESKS - 1] = {.caller = GATE}};
static gate helpers[MAX_HELPERS] = {[0 ... MAX_HELPERS - 1] = GATE};
static atomic_int num_helpers;
static atomic_uint num_published;
static pthread_mutex_t growing = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ns(void) {
    struct timespec its;
    clock_gettime(CLOCK_MONOTONIC, &its);
    return (int64_t)its.tv_sec * 1000000000 + its.tv_nsec;
}

static void pause_briefly(void) {
    for (int i = 0; i < 8; i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb" ::: "memory");
#endif
    }
}

/* Wait at a gate until a condition holds. Who makes it hold wakes the gate afterwards. */
#define WAIT(ITS, CONDITION) \
    do { \
        const int64_t until_ns = now_ns() + SPIN_NS; \
        while (!(CONDITION) && now_ns() < until_ns) pause_briefly(); \
        if (CONDITION) break; \
        pthread_mutex_lock(&(ITS)->lock); \
        atomic_store(&(ITS)->is_asleep, 1); \
        while (!(CONDITION)) pthread_cond_wait(&(ITS)->woken, &(ITS)->lock); \
        atomic_store(&(ITS)->is_asleep, 0); \
        pthread_mutex_unlock(&(ITS)->lock); \
    } while (0)

static void wake(gate *its) {
    if (!atomic_load(&its->is_asleep)) return;
    pthread_mutex_lock(&its->lock);
    pthread_cond_signal(&its->woken);
    pthread_mutex_unlock(&its->lock);
}

/* Claim and do parts of a desk until none is left. helper: a helper's number; -1: the caller itself. */
static void do_parts(desk *its, int64_t helper) {
    uint64_t state = atomic_load(&its->state);
    while (state & LEFT && helper < (int64_t)(state >> HELPERS_AT)) {
        if (!atomic_compare_exchange_weak(&its->state, &state, state - 1)) continue;
        const int64_t parts = its->parts, first = (parts - (int64_t)(state & LEFT)) * its->step;
        const int64_t end = first + its->step < its->count ? first + its->step : its->count;
        its->run(its->work, first, end);
        if (atomic_fetch_add(&its->num_done, 1) + 1 == parts) wake(&its->caller);
        state = atomic_load(&its->state);
    }
}

static void *help(void *argument) {
    const int64_t number = (gate *)argument - helpers;
    unsigned seen = 0;
    for (;;) {
        WAIT(&helpers[number], atomic_load(&num_published) != seen);
        seen = atomic_load(&num_published);
        for (int i = 0; i < DESKS; i++) do_parts(&desks[i], number);
    }
    return NULL;
}

/* A child process has none of its parent's threads, and their locks may be taken. */
static void forget(void) {
    for (int i = 0; i < DESKS; i++) desks[i] = (desk){.caller = GATE};
    for (int i = 0; i < MAX_HELPERS; i++) helpers[i] = (gate)GATE;
    atomic_store(&num_helpers, 0);
    growing = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* Have so many helpers, or as many as the system gives. Signals are for the process's other threads. */
static void grow(int64_t wanted) {
    pthread_mutex_lock(&growing);
    static int is_watched;
    if (!is_watched) is_watched = !pthread_atfork(NULL, NULL, forget);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int number = atomic_load(&num_helpers); number < wanted; number++) {
        pthread_t made;
        if (pthread_create(&made, NULL, help, &helpers[number])) break;
        pthread_detach(made);
        atomic_store(&num_helpers, number + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&growing);
}

static desk *free_desk(void) {
    for (int i = 0; i < DESKS; i++) {
        int expected = 0;
        if (atomic_compare_exchange_strong(&desks[i].is_taken, &expected, 1)) return &desks[i];
    }
    return NULL;
}

void share(part run, void *work, int64_t count, int64_t step, int64_t threads) {
    const int64_t parts = (count + step - 1) / step;
    int64_t wanted = (threads < parts ? threads : parts) - 1;
    if (wanted > MAX_HELPERS) wanted = MAX_HELPERS;
    desk *its = wanted > 0 && parts < (int64_t)LEFT ? free_desk() : NULL;
    if (!its) {
        for (int64_t first = 0; first < count; first += step) run(work, first, first + step < count ? first + step : count);
        return;
    }
    if (wanted > atomic_load(&num_helpers)) grow(wanted);
    its->run = run, its->work = work, its->count = count, its->step = step, its->parts = parts;
    atomic_store(&its->num_done, 0);
    atomic_store(&its->state, (uint64_t)wanted << HELPERS_AT | (uint64_t)parts);
    atomic_fetch_add(&num_published, 1);
    for (int64_t i = 0; i < wanted && i < atomic_load(&num_helpers); i++) wake(&helpers[i]);
    do_parts(its, -1);
    WAIT(&its->caller, atomic_load(&its->num_done) == parts);
    atomic_store(&its->is_taken, 0);
}
