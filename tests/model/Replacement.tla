---------------------------- MODULE Replacement ----------------------------
(* Replacing tiered segments under a running, unmodified broker.

   A control log with compare-and-set, the topic __remote_log_metadata without it, a broker that lags behind that topic, an object store,
   and compactors of which each but the last may stop at any moment with one record on its way (a zombie's record lands whenever it likes).

   The log has five segments of one offset each; the last is the newest. Key k was written at offset 0 and deleted at offset 3; the tombstone
   has expired, so that round 1 drops both: group 1 puts [0..2] in the place of S0, S1 and S2, group 2 puts [3..3] in the place of S3. Round 2
   merges both results into one segment, so that late records of round 1 meet ids that are finished; or, where Undoes, it takes round 1 back:
   copies of what the groups replaced, under new ids, the last group first.

   Rule names are those of docs/broker-protocol.md. Each can be dropped: Drop = {"R3"} and so on; each drop has a counterexample. *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
  Drop,        \* names of rules left out
  Epochs,      \* number of compactors that lead, one after another
  BrokerActs,  \* whether the broker deletes records (and segments in COPY_SEGMENT_STARTED) by itself
  Undoes       \* whether round 2 takes round 1 back

VARIABLES
  ctl,      \* the folded control log: one record is one step, and counts only from the leader
  flight,   \* by compactor: a record for the topic that is on its way, or None
  cache,    \* what a broker that has read the whole topic makes of it
  pending,  \* the id that is just being put where older entries had to go first, or None
  lagging,  \* ids that some broker, lagging by less than grace, still answers with
  caught,   \* whether grace has passed since the last round was published
  objects,  \* ids whose objects are in the store
  start,    \* the log's start offset
  acted     \* whether the broker has deleted something by itself

vars == <<ctl, flight, cache, pending, lagging, caught, objects, start, acted>>

None == <<>>
Keeps(rule) == rule \notin Drop

\* --- segments ---------------------------------------------------------------------------------------------------------------

S(i) == <<"S", i, i, 0>>                  \* <<kind, first offset, last offset, number of the plan that drew its id>>
Newest == S(4)
Sources0 == {S(i) : i \in 0..4}

Plans == 3                                \* round 1, again after it was undone, round 2: ids are never reused
Group(r, g, e) ==                         \* the new segment of group g in round r, by plan e
  IF r = 1 THEN IF g = 1 THEN <<"A", 0, 2, e>> ELSE IF Keeps("R8") THEN <<"A", 3, 3, e>> ELSE <<"A", 3, 4, e>>
           ELSE IF Undoes THEN IF g = 1 THEN <<"C", 0, 2, e>> ELSE <<"C", 3, 3, e>>
           ELSE <<"B", 0, 3, e>>
Groups(r) == IF r = 1 \/ Undoes THEN 1..2 ELSE 1..1
First(id) == id[2]
Last(id) == id[3]
Ids == Sources0 \cup {Group(r, g, e) : r \in 1..2, g \in 1..2, e \in 1..Plans}
Ours == Ids \ Sources0
Holds(id) == IF id[1] \notin {"S", "C"} THEN {} ELSE IF First(id) = 0 THEN {"put"} ELSE IF First(id) = 3 THEN {"tombstone"} ELSE {}

\* --- what a broker makes of the topic (RemoteLogMetadataCache), one leader epoch --------------------------------------------------

Empty == [st |-> [id \in Ids |-> "none"], at |-> [o \in 0..4 |-> None], high |-> 0]

Superseded(c, id) == {o \in 0..4 : o >= First(id) /\ c.at[o] # None /\ c.high <= Last(id)}

Started(c, id) == IF c.st[id] = "none" THEN [c EXCEPT !.st[id] = "started"] ELSE c
Cleared(c, id) == [c EXCEPT !.at = [o \in 0..4 |-> IF o \in Superseded(c, id) THEN None ELSE c.at[o]]]
Put(c, id) == [c EXCEPT !.at[First(id)] = id, !.st[id] = "finished", !.high = IF c.high > Last(id) THEN c.high ELSE Last(id)]
Taken(c, id) ==
  IF c.st[id] \in {"started", "finished", "deleting"}
  THEN [c EXCEPT !.st[id] = "deleting", !.at[First(id)] = IF c.at[First(id)] = id THEN None ELSE c.at[First(id)]]
  ELSE c
Gone(c, id) == IF c.st[id] = "deleting" THEN [c EXCEPT !.st[id] = "none"] ELSE c
MayFinish(c, id) == c.st[id] \in {"started", "finished"}

Apply(c, ev) ==
  CASE ev[1] = "START" -> Started(c, ev[2])
    [] ev[1] = "COPY_FINISHED" -> IF MayFinish(c, ev[2]) THEN Put(Cleared(c, ev[2]), ev[2]) ELSE c
    [] ev[1] = "DELETE_STARTED" -> Taken(c, ev[2])
    [] ev[1] = "DELETE_FINISHED" -> Gone(c, ev[2])

RECURSIVE Fold(_, _)
Fold(c, log) == IF log = <<>> THEN c ELSE Fold(Apply(c, Head(log)), Tail(log))

Floor(c, o) == LET below == {k \in 0..o : c.at[k] # None}
               IN IF below = {} THEN None ELSE c.at[CHOOSE k \in below : \A j \in below : j <= k]
Lookup(c, o) == LET id == Floor(c, o) IN IF id = None THEN None ELSE IF o <= Last(id) THEN id ELSE None

\* --- the compactors' own view: the whole topic ------------------------------------------------------------------------------------

Now == cache
Effective(id) == Now.st[id] = "finished" /\ Lookup(Now, First(id)) = id
SourcesOf(r, g, e) ==
  IF r = 1 THEN IF g = 1 THEN {S(0), S(1), S(2)} ELSE IF Keeps("R8") THEN {S(3)} ELSE {S(3), S(4)}
           ELSE {id \in Ours : id[1] = "A" /\ id \in ctl.live /\ (Undoes => First(id) = IF g = 1 THEN 0 ELSE 3)}
SourcesLeft(r, g, e) == {id \in SourcesOf(r, g, e) : Now.st[id] = "finished"}
Mine == {Group(ctl.round, g, ctl.planner) : g \in Groups(ctl.round)}
Id(g) == Group(ctl.round, g, ctl.planner)

\* A group is cut off where the broker has taken one of its sources, or its own segment, before it was published.
Broken(g) ==
  \/ g \in ctl.cut
  \/ g \in ctl.started /\ Now.st[Id(g)] \in {"none", "deleting"}
  \/ Now.st[Id(g)] # "finished" /\ \E id \in SourcesOf(ctl.round, g, ctl.planner) : Now.st[id] # "finished"
\* And so is every group behind it: what it has dropped may be tombstones of values that stay in the group that was cut off.
\* On the way back values return, and the tombstones that delete them have to be there before: the last group comes first.
Backwards == Undoes /\ ctl.round = 2 /\ Keeps("descending")
Before(g) == {h \in Groups(ctl.round) : IF Backwards THEN h > g ELSE h < g}
Lost(g) == Broken(g) \/ (Keeps("behind") /\ Now.st[Id(g)] # "finished" /\ \E h \in Before(g) : Broken(h) /\ Now.st[Id(h)] # "finished")
Switched(g) == \/ Lost(g) /\ Now.st[Id(g)] \in {"none", "deleting"}
               \/ Effective(Id(g)) /\ SourcesLeft(ctl.round, g, ctl.planner) = {}

\* --- the leader's next step: everything follows from the control log and the topic, so that whoever takes over goes on ---------------

Send(e, kind, id) == flight[e] = None /\ flight' = [flight EXCEPT ![e] = <<kind, id>>]
Leads(e) == ctl.epoch = e /\ flight[e] = None
SameButFlight == UNCHANGED <<ctl, objects, cache, pending, lagging, caught, start, acted>>
SameButCtl == UNCHANGED <<flight, objects, cache, pending, lagging, caught, start, acted>>

TakeOver == /\ ctl.epoch < Epochs
            /\ ctl' = [ctl EXCEPT !.epoch = ctl.epoch + 1]
            /\ SameButCtl

\* Ids that were announced or started and belong to no open round: cut off, so that whatever is late does not count.
Strangers == {id \in Ours : /\ Now.st[id] \in {"started", "finished"}
                            /\ id \notin ctl.live
                            /\ ~(ctl.phase \in {"open", "begun"} /\ id \in Mine)}
Unstarted == {id \in ctl.undone : Now.st[id] = "none" /\ id \notin ctl.cutoff}

CutOff(e) == /\ Leads(e) /\ Keeps("cut off")
             /\ \/ \E id \in Strangers : Send(e, "DELETE_STARTED", id)
                \/ Strangers = {} /\ \E id \in Unstarted : Send(e, "START", id)
             /\ IF Strangers = {} THEN \E id \in Unstarted : flight'[e][2] = id /\ ctl' = [ctl EXCEPT !.cutoff = @ \cup {id}]
                                  ELSE UNCHANGED ctl
             /\ UNCHANGED <<objects, cache, pending, lagging, caught, start, acted>>
Clean == Keeps("cut off") => Strangers = {} /\ Unstarted = {}

\* What round 1 replaced is all there, and stays while it is copied: whoever retires settles the open round before.
\* (To keep this small, round 1 is neither given up nor retired before it is taken back: that is in the other sizes.)
Restorable == {S(i) : i \in 0..3} \subseteq objects
Kept == Undoes /\ ~(ctl.round = 2 /\ ctl.phase # "open")

Announce(e) == /\ Leads(e) /\ Clean /\ ctl.phase = "idle" /\ ctl.round < 2
               /\ IF ctl.round = 1 THEN Cardinality({id \in ctl.live : id[1] = "A"}) = 2 /\ (IF Undoes THEN Restorable ELSE ctl.retired) ELSE TRUE
               /\ \A id \in Sources0 : ctl.round = 0 /\ id # Newest => Now.st[id] = "finished"
               /\ ctl' = [ctl EXCEPT !.phase = "open", !.round = @ + 1, !.planner = @ + 1, !.cut = {}, !.started = {}]
               /\ SameButCtl

\* The rewrite is complete before START; then the upload.
SendStart(e) == /\ Leads(e) /\ ctl.phase = "open"
                /\ \E g \in Groups(ctl.round) :
                     /\ g \notin ctl.started
                     /\ Send(e, "START", Id(g))
                     /\ ctl' = [ctl EXCEPT !.started = @ \cup {g}]   \* a receipt in the control log: it is known who may have sent it
                /\ UNCHANGED <<objects, cache, pending, lagging, caught, start, acted>>

Upload(e) == /\ Leads(e) /\ ctl.phase = "open"
             /\ \E g \in ctl.started : /\ Now.st[Id(g)] = "started"
                                       /\ Id(g) \notin objects
                                       /\ objects' = objects \cup {Id(g)}
             /\ UNCHANGED <<ctl, flight, cache, pending, lagging, caught, start, acted>>

Uploaded == \A g \in Groups(ctl.round) : g \in ctl.started /\ Id(g) \in objects

\* Before publish begun a round can go back: other settings, another version, a source that has gone.
Undo(e) == /\ Leads(e)
           /\ \/ ctl.phase = "open"
              \/ ~Keeps("publish begun") /\ ctl.phase = "begun"
           /\ ctl.undos < 1 /\ (Undoes => ctl.round = 2)
           /\ ctl' = [ctl EXCEPT !.phase = "idle", !.round = @ - 1, !.undone = @ \cup Mine, !.undos = @ + 1]
           /\ SameButCtl
\* A START that was lost to the broker's own deletion can only be undone.
UndoLost(e) == /\ Leads(e) /\ ctl.phase = "open"
               /\ \E g \in Groups(ctl.round) : Lost(g) /\ g \in ctl.started
               /\ ctl.undos = 1
               /\ ctl' = [ctl EXCEPT !.phase = "given up", !.undone = @ \cup Mine]
               /\ SameButCtl

Begin(e) == /\ Leads(e) /\ ctl.phase = "open" /\ Uploaded /\ Clean
            /\ ctl' = [ctl EXCEPT !.phase = "begun"]
            /\ SameButCtl

InTurn(g) == Keeps("ascending") => \A h \in Before(g) : Switched(h)

\* A predecessor's record lands, or its producer has given it up (delivery.timeout.ms), before the next one switches readers: applied once
\* more, a late COPY_FINISHED of an id that is finished already would take its place back, and leave a hole when that id is deleted.
Landed(e) == Keeps("wait") => \A d \in 1..(e - 1) : flight[d] = None

Finish(e) == /\ Leads(e) /\ ctl.phase = "begun" /\ Landed(e)
             /\ \E g \in Groups(ctl.round) :
                  /\ InTurn(g) /\ ~Lost(g)
                  /\ Now.st[Id(g)] = "started" \/ (Now.st[Id(g)] = "finished" /\ ~Effective(Id(g)))
                  /\ Send(e, "COPY_FINISHED", Id(g))
             /\ SameButFlight

CutGroup(e) == /\ Leads(e) /\ ctl.phase = "begun"
               /\ \E g \in Groups(ctl.round) :
                    /\ InTurn(g) /\ Lost(g) /\ Now.st[Id(g)] = "started"
                    /\ Send(e, "DELETE_STARTED", Id(g))
                    /\ ctl' = [ctl EXCEPT !.cut = @ \cup {g}]
               /\ UNCHANGED <<objects, cache, pending, lagging, caught, start, acted>>

DeleteStarted(e) ==
  /\ Leads(e) /\ ctl.phase = "begun"
  /\ \E g \in Groups(ctl.round) :
       /\ IF Keeps("R3") THEN IF Keeps("look") THEN Effective(Id(g)) ELSE ~(Now.st[Id(g)] = "started") /\ g \in ctl.started /\ InTurn(g)
                         ELSE InTurn(g)
       /\ \E id \in SourcesLeft(ctl.round, g, ctl.planner) :
            /\ Keeps("R3b") => \A other \in SourcesLeft(ctl.round, g, ctl.planner) : First(id) <= First(other)
            /\ Send(e, "DELETE_STARTED", id)
  /\ SameButFlight

Publish(e) == /\ Leads(e) /\ ctl.phase = "begun"
              /\ \A g \in Groups(ctl.round) : Switched(g)
              /\ ctl' = [ctl EXCEPT !.phase = "idle", !.retired = FALSE,
                                    !.live = {id \in Ours : Now.st[id] = "finished"},
                                    !.waiting = {id \in Ids : Now.st[id] = "deleting" /\ id \notin ctl.undone},
                                    !.complete = @ /\ \A g \in Groups(ctl.round) : Effective(Id(g))]
              /\ caught' = FALSE
              /\ UNCHANGED <<flight, objects, cache, pending, lagging, start, acted>>

\* Grace: no broker lags further behind than that.
Grace == Keeps("grace") => caught

Due == {id \in ctl.waiting \cup {i \in Ours : i \in ctl.undone} : Now.st[id] = "deleting"}
Delete(e) == /\ Leads(e) /\ ctl.phase # "begun" /\ ~Kept /\ Grace
             /\ \E id \in Due : id \in objects /\ objects' = objects \ {id}
             /\ UNCHANGED <<ctl, flight, cache, pending, lagging, caught, start, acted>>
DeleteFinished(e) == /\ Leads(e) /\ ctl.phase # "begun"
                     /\ \E id \in {i \in Ids : Now.st[i] = "deleting" /\ (i \in Due \/ (i \in Ours /\ i \notin ctl.live))} \ objects : Send(e, "DELETE_FINISHED", id)
                     /\ SameButFlight
Retired(e) == /\ Leads(e) /\ ctl.phase = "idle" /\ ~ctl.retired
              /\ \A id \in Ids : Now.st[id] # "deleting"
              /\ ctl' = [ctl EXCEPT !.retired = TRUE, !.waiting = {}]
              /\ SameButCtl
\* The objects of ids that were cut off in a round that went forward are swept, too.
Sweep(e) == /\ Leads(e) /\ ctl.phase # "begun" /\ Grace
            /\ \E id \in objects \cap Ours : /\ Now.st[id] \in {"deleting", "none"} /\ id \notin ctl.live
                                             /\ ~(ctl.phase = "open" /\ id \in Mine)
                                             /\ objects' = objects \ {id}
            /\ UNCHANGED <<ctl, flight, cache, pending, lagging, caught, start, acted>>

\* --- the world ----------------------------------------------------------------------------------------------------------------

Answers(c) == {Lookup(c, o) : o \in 0..4} \ {None}

\* Where older entries have to go first, a broker's step is not one: readers look in between.
Land == \E e \in 1..Epochs :
          LET ev == flight[e]
          IN /\ ev # None
             /\ flight' = [flight EXCEPT ![e] = None]
             /\ IF ev[1] = "COPY_FINISHED" /\ MayFinish(cache, ev[2]) /\ Superseded(cache, ev[2]) # {}
                THEN cache' = Cleared(cache, ev[2]) /\ pending' = ev[2]
                ELSE cache' = Apply(cache, ev) /\ pending' = None
             /\ lagging' = lagging \cup Answers(cache')
             /\ UNCHANGED <<ctl, objects, caught, start, acted>>
LandRest == /\ pending # None
            /\ cache' = Put(cache, pending) /\ pending' = None
            /\ lagging' = lagging \cup Answers(cache')
            /\ UNCHANGED <<ctl, flight, objects, caught, start, acted>>
Expire == \E e \in 1..Epochs : /\ e < ctl.epoch /\ flight[e] # None
                               /\ flight' = [flight EXCEPT ![e] = None]
                               /\ UNCHANGED <<ctl, cache, pending, lagging, caught, objects, start, acted>>
GraceOver == /\ ~caught /\ ctl.phase # "begun"
             /\ caught' = TRUE /\ lagging' = Answers(cache)
             /\ UNCHANGED <<ctl, flight, cache, pending, objects, start, acted>>

\* kafka-delete-records up to offset 1, or retention: the broker deletes S0 by itself, or a segment of ours that is only started.
DeletedBy(c, id) == Gone(Taken(c, id), id)
BrokerDeletes ==
  /\ BrokerActs /\ ~acted
  /\ \E id \in {S(0)} \cup {i \in Ours : Now.st[i] = "started" /\ First(i) = 0} :
       /\ Now.st[id] \in {"started", "finished"}
       /\ cache' = DeletedBy(cache, id)
       /\ objects' = objects \ {id}
       /\ lagging' = (lagging \ {id}) \cup Answers(cache')
       /\ start' = IF id = S(0) THEN 1 ELSE start
  /\ acted' = TRUE
  /\ UNCHANGED <<ctl, flight, pending, caught>>

Tiered == <<<<"START", S(0)>>, <<"COPY_FINISHED", S(0)>>, <<"START", S(1)>>, <<"COPY_FINISHED", S(1)>>,
            <<"START", S(2)>>, <<"COPY_FINISHED", S(2)>>, <<"START", S(3)>>, <<"COPY_FINISHED", S(3)>>, <<"START", S(4)>>, <<"COPY_FINISHED", S(4)>>>>

Init == /\ cache = Fold(Empty, Tiered)
        /\ lagging = {S(i) : i \in 0..4} /\ caught = TRUE
        /\ ctl = [epoch |-> 1, phase |-> "idle", round |-> 0, planner |-> 0, started |-> {}, cut |-> {}, undone |-> {}, cutoff |-> {},
                  live |-> {}, waiting |-> {}, retired |-> TRUE, complete |-> TRUE, undos |-> 0]
        /\ flight = [e \in 1..Epochs |-> None]
        /\ objects = Sources0 /\ pending = None /\ start = 0 /\ acted = FALSE

Lead(e) == \/ CutOff(e) \/ Announce(e) \/ SendStart(e) \/ Upload(e) \/ Undo(e) \/ UndoLost(e) \/ Begin(e) \/ Finish(e) \/ CutGroup(e)
           \/ DeleteStarted(e) \/ Publish(e) \/ Delete(e) \/ DeleteFinished(e) \/ Retired(e) \/ Sweep(e)
Next == \/ LandRest
        \/ pending = None /\ (TakeOver \/ Land \/ Expire \/ GraceOver \/ BrokerDeletes \/ \E e \in 1..Epochs : Lead(e))
Spec == Init /\ [][Next]_vars

\* --- what must hold for readers, at every record of the topic (a broker that lags is where another one was before) ---------------------

\* No offset without a segment.
Covered == \A o \in start..4 : Lookup(cache, o) # None
\* No deleted object that a broker still answers with.
Readable == \A id \in lagging : id \in objects \/ Last(id) < start
\* A reader goes from segment to segment, from the start to the end; k is deleted, and stays deleted.
RECURSIVE Scan(_, _)
Scan(o, seen) ==
  IF o > 4 THEN seen
  ELSE LET id == Lookup(cache, o)
       IN IF id = None THEN seen
          ELSE Scan(Last(id) + 1, IF Holds(id) = {} THEN seen ELSE Holds(id) = {"put"})
NothingOldAfterNew == Covered => ~Scan(start, FALSE)
\* What every crash comes to in the end: nothing that is ours is left half done, nothing lies in the store that nobody reads.
Finished == /\ ctl.phase \in {"idle", "given up"}
            /\ \A id \in Ours : Now.st[id] \in {"none", "finished"}
            /\ \A id \in Ours : Now.st[id] = "finished" => id \in ctl.live
            /\ objects \cap Ours = {id \in Ours : Now.st[id] = "finished"}
CanBeFinished == ENABLED Next \/ Finished
=============================================================================
